"""What the demo and the parity cases train: a tiny Llama from a seed, on text that every machine with Python has."""

from __future__ import annotations

import hashlib
import json
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.files import file_with

DIRECTORY = ROOT / "build" / "demo" / "assets"
"""Where the tiny recipes look for their model and data."""
RECIPE = ROOT / "recipes" / "tiny-llama-pretrain-cpu.yaml"
COMMON = ("run.steps=10", "job.global_batch_size=8", "job.optimizer.eps=1e-4", "run.checkpoint.every_steps=1000")
"""Ten steps. Early Adam is sign descent: a large epsilon keeps rounding from being amplified to a full step."""
# Three steps: the choice of experts is a step function, and a token at a tie goes elsewhere after rounding. Plain torch
# with another micro batch size is already 1.6e-4 from itself in the gradient norm of step 10.
_EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "run.steps=3")
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": ("model.family=mistral", "model.sliding_window=50"),
    "phi3": ("model.family=phi3",),
    "gpt2": (
        "model.family=gpt2",
        "model.num_key_value_heads=4",
        "model.rope_theta=null",
        "model.tied_embeddings=true",
    ),
    "mixtral": ("model.family=mixtral", "model.moe_ffn_hidden_size=192", *_EXPERTS),
    "qwen3_moe": ("model.family=qwen3_moe", "model.moe_ffn_hidden_size=48", *_EXPERTS),
}
"""Changes to the tiny recipe's model."""
VOCAB_SIZE = 1024
TRAIN_CHARACTERS = 1_500_000
VALIDATION_CHARACTERS = 150_000
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Assets:
    """Where the inputs lie."""

    model: Path
    """Hugging Face directory: weights, config, tokenizer."""
    train: Path
    """Prefix of the training pair."""
    validation: Path
    """Prefix of the held-out pair; its text comes from other files than the training text."""


def prepare() -> Assets:
    """Make everything once."""
    if not DIRECTORY.exists():
        print("  making a tokenizer, a model and data from the standard library's sources …", flush=True)
        once(DIRECTORY, lambda attempt: _make(_assets(attempt)))
    return _assets(DIRECTORY)


def model_variant(name: str, overrides: Sequence[str]) -> Path:
    """The Hugging Face directory of another tiny model: the recipe's shape with changes; made once a shape."""
    shape = hashlib.sha256(" ".join(overrides).encode()).hexdigest()[:8]
    directory = DIRECTORY.with_name("variants") / f"{name}-{shape}"
    if not directory.exists():
        once(directory, lambda attempt: _write_model(attempt, overrides))
    return directory


def once(directory: Path, make: Callable[[Path], None]) -> None:
    """Make a directory whole or not at all. Of several processes that make it (pytest's workers while they collect) the
    first one's stays; an interrupted one leaves nothing that looks complete."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{directory.name}.", dir=directory.parent) as scratch:
        attempt = Path(scratch) / "attempt"
        make(attempt)
        try:
            attempt.rename(directory)
        except OSError:
            if not directory.exists():
                raise


def byte_tokenizer(directory: Path, *special: str, **options: Any) -> None:
    """Saves a tokenizer of an id a byte behind those of the special tokens; ``options`` are of transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner, **options).save_pretrained(directory)


def _assets(directory: Path) -> Assets:
    return Assets(directory / "model", directory / "train", directory / "validation")


def _make(assets: Assets) -> None:
    from kit.training.data.tokenise import tokenise

    assets.model.mkdir(parents=True)
    train_text, validation_text = _library_text()
    _write_tokenizer(train_text, assets.model)
    _write_model(assets.model)
    for prefix, texts in ((assets.train, train_text), (assets.validation, validation_text)):
        rows = file_with(prefix.with_suffix(".jsonl"), "".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenise([rows], assets.model, prefix)


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
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT).save_pretrained(
        directory
    )


def _write_model(directory: Path, overrides: Sequence[str] = ()) -> None:
    """Random weights from the recipe's shape and a fixed seed, as ``from_pretrained`` expects them.

    Their deviation is 1/√hidden_size. The usual 0.02 suits a hidden size of thousands: of 64, a few steps can bring the
    residual stream of a token near zero. RMSNorm then divides by next to nothing, that step's gradient norm is up to 40
    times its neighbours', and rounding grows to 1e-3 of it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from kit.engines.huggingface.models import hf_config
    from kit.specs.recipe import load_recipe

    torch.manual_seed(1234)
    config = hf_config(load_recipe(RECIPE, overrides).model)
    config.initializer_range = config.hidden_size**-0.5
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
