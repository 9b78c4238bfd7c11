"""What the demo trains: a tiny Llama made from a seed, and text that every machine with Python has."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

VOCAB_SIZE = 1024
TRAIN_CHARACTERS = 1_500_000
VALIDATION_CHARACTERS = 150_000
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Assets:
    """Where the demo's inputs lie."""

    model: Path
    """Hugging Face directory: weights, config, tokenizer."""
    train: Path
    """Prefix of the training pair."""
    validation: Path
    """Prefix of the held-out pair; its text comes from other files than the training text."""


def make_assets(directory: Path, recipe: Path) -> Assets:
    """Write the tokenizer, the model and the tokenised text into ``directory``, which must be new or empty."""
    from kit.training.data.tokenise import tokenise

    directory.mkdir(parents=True, exist_ok=True)
    assets = Assets(directory / "model", directory / "train", directory / "validation")
    train_text, validation_text = _library_text()
    rows = {"train": train_text, "validation": validation_text}
    for name, files in rows.items():
        lines = (json.dumps({"text": text}) for text in files)
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write_tokenizer(train_text, assets.model)
    _write_model(recipe, assets.model)
    for name, prefix in (("train", assets.train), ("validation", assets.validation)):
        tokenise([directory / f"{name}.jsonl"], assets.model, prefix)
    return assets


def _library_text() -> tuple[list[str], list[str]]:
    """The standard library's top-level modules in alphabetic order, dealt into training and held-out files."""
    wanted = {"train": TRAIN_CHARACTERS, "validation": VALIDATION_CHARACTERS}
    texts: dict[str, list[str]] = {"train": [], "validation": []}
    for index, file in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        part = "validation" if index % 10 == 9 else "train"
        if wanted[part] > 0:
            text = file.read_text(encoding="utf-8", errors="replace")[: wanted[part]]
            texts[part].append(text)
            wanted[part] -= len(text)
    return texts["train"], texts["validation"]


def _write_tokenizer(texts: list[str], directory: Path) -> None:
    """A byte-level BPE trained on the training text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT).save_pretrained(directory)


def _write_model(recipe: Path, directory: Path) -> None:
    """Random weights from the recipe's shape and a fixed seed, as ``from_pretrained`` expects them."""
    import torch
    from transformers import AutoModelForCausalLM

    from kit.engines.hf import hf_config
    from kit.specs.recipe import load_recipe

    torch.manual_seed(1234)
    config = hf_config(load_recipe(recipe).model)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
