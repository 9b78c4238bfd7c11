"""Text that a checkpoint generates, for a look: transformers' own generation, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kit.errors import CheckpointError
from kit.training.checkpoint.convert import convert
from kit.training.completion import Completion
from kit.training.data.tokenizers import load_tokenizer
from kit.training.hub_files import local


def generate(
    path: Path,
    prompts: Sequence[str],
    *,
    tokenizer: Path | None = None,
    merge_into: Path | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Completion]:
    """Completions of ``prompts``, one after the other.

    ``path``: a Hugging Face model, or a checkpoint that ``convert`` reads; a checkpoint is first converted, into a
    temporary directory as large as the weights in bf16. ``tokenizer``: its directory; None: ``merge_into`` or ``path``.
    ``merge_into``: for adapters, the directory of their model. ``temperature``: 0 takes the likeliest token each time.
    Raises KitError for a checkpoint that ``convert`` refuses, or without a tokenizer.
    """
    path = local(path, weights=True)
    merge_into = merge_into and local(merge_into, weights=True)
    words = local(tokenizer or merge_into or path)
    if not (words / "tokenizer.json").is_file() and not (words / "tokenizer_config.json").is_file():
        raise CheckpointError(f"{words} has no tokenizer (tokenizer.json); name its directory with --tokenizer")
    tokens, _ = load_tokenizer(words)
    if is_hugging_face(path):
        if merge_into is not None:
            raise CheckpointError(f"--merge-into {merge_into} is for adapters, and {path} is a whole model; omit it")
        model = _load(path)
    else:
        with TemporaryDirectory(prefix="kit-generate-") as directory:
            converted = Path(directory) / "model"
            convert(path, "hf", converted, merge_into=merge_into)
            if not is_hugging_face(converted):
                raise CheckpointError(f"{path} holds adapters; name the directory of their model with --merge-into")
            model = _load(converted)
    torch.manual_seed(seed)
    found = []
    for prompt in prompts:
        given = torch.tensor([tokens(prompt)["input_ids"]], device=model.device)
        if not given.numel():
            raise CheckpointError("the prompt has no tokens; give a text")
        drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        with torch.no_grad():
            output = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=max_new_tokens, **drawn
            )
        own = output[0] if model.config.is_encoder_decoder else output[0, given.shape[1] :]
        found.append(Completion(prompt, tokens.decode(own, skip_special_tokens=True)))
    return found


def is_hugging_face(directory: Path) -> bool:
    """Whether transformers loads a whole model from the directory."""
    weights = ("model.safetensors", "model.safetensors.index.json")
    return (directory / "config.json").is_file() and any((directory / name).is_file() for name in weights)


def _load(directory: Path) -> Any:
    """The model, in the dtype of its files, on the GPU if there is one."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
    )
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
