"""Text that a checkpoint generates, for a look: transformers' own generation, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig

from kit.engines.huggingface.models import auto_class
from kit.errors import CheckpointError
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.manifest import Checkpoint, written_by_kit
from kit.training.checkpoint.of_run import newest_step, started_from
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
    raw: bool = False,
) -> list[Completion]:
    """Completions of ``prompts``, one after the other.

    ``path``: a Hugging Face model, a run directory, whose newest checkpoint is meant, or a checkpoint that ``convert``
    reads; a checkpoint is first converted, into a temporary directory as large as the weights in bf16. ``tokenizer``:
    its directory; None: ``merge_into``, ``path``, or the model that the run started from. ``merge_into``: for adapters,
    the directory of their model; None: that of the run. ``temperature``: 0 takes the likeliest token each time. A
    prompt is a user's turn by the chat template of the model, or of the rows that it was trained on, if there is one;
    ``raw``: as it is.
    Raises KitError for a checkpoint that ``convert`` refuses, or without a tokenizer.
    """
    path, merge_into = newest_step(local(path, weights=True)), merge_into and local(merge_into, weights=True)
    said = Checkpoint(path).manifest if written_by_kit(path) else None
    if said is not None and said.lora is not None and merge_into is None:
        merge_into = started_from(path)
    own = path if any(path.glob("tokenizer*.json")) else started_from(path)
    words = local(tokenizer or merge_into or own or path)
    if not (words / "tokenizer.json").is_file() and not (words / "tokenizer_config.json").is_file():
        raise CheckpointError(f"{words} has no tokenizer (tokenizer.json); name its directory with --tokenizer")
    tokens, _ = load_tokenizer(words)
    if said is not None:
        tokens.chat_template = said.chat_template
    chat = bool(tokens.chat_template) and not raw
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
        given = torch.tensor([_ids(tokens, prompt, chat)], device=model.device)
        if not given.numel():
            raise CheckpointError("the prompt has no tokens; give a text")
        drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        with torch.no_grad():
            output = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=max_new_tokens, **drawn
            )
        reply = output[0] if model.config.is_encoder_decoder else output[0, given.shape[1] :]
        found.append(Completion(prompt, tokens.decode(reply, skip_special_tokens=True), chat))
    return found


def _ids(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Token ids of a text, or of a chat that begins with it and asks for a reply."""
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) if chat else prompt
    ids: list[int] = tokenizer(text, add_special_tokens=not chat)["input_ids"]
    return ids


def is_hugging_face(directory: Path) -> bool:
    """Whether transformers loads a whole model from the directory."""
    weights = ("model.safetensors", "model.safetensors.index.json")
    return (directory / "config.json").is_file() and any((directory / name).is_file() for name in weights)


def _load(directory: Path) -> Any:
    """The model, in the dtype of its files, on the GPU if there is one."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    model = auto_class(config.is_encoder_decoder).from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
    )
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
