"""Loads a local Hugging Face tokenizer, and says whether two tokenizers are the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kit.errors import DataError


def load_tokenizer(directory: Path, vocab_size: int | None = None) -> tuple[Any, int]:
    """(tokenizer, number of its ids). Raises DataError if it cannot be read, or if it has more ids than ``vocab_size``
    (None: the vocabulary of the config.json beside it)."""
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory; give a downloaded model's or tokenizer's")
    if not any(file for pattern in ("*token*", "*vocab*", "*.model", "*.bpe") for file in directory.glob(pattern)):
        # transformers makes an empty one from a config.json alone.
        raise DataError(f"{directory} holds no tokenizer; copy tokenizer.json and tokenizer_config.json there")
    try:
        loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # of transformers, tokenizers and huggingface_hub, which checks a config.json
        raise DataError(
            f"{directory} holds no tokenizer that transformers loads ({one_line(error)}); copy it again"
        ) from error
    ids = max(loaded.get_vocab().values()) + 1
    limit = vocab_size if vocab_size is not None else model_config(directory).get("vocab_size")
    if isinstance(limit, int) and ids > limit:
        raise DataError(
            f"the tokenizer in {directory} has ids up to {ids - 1}, and the model's vocabulary ends at "
            f"{limit - 1}; use the model's own tokenizer or enlarge vocab_size"
        )
    return loaded, ids


def model_config(directory: Path) -> dict[str, Any]:
    """Content of the config.json beside a tokenizer; empty if the file is missing or unreadable."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def fingerprint(tokenizer: Any) -> str:
    """A hash of all that decides a tokenizer's ids: vocabulary, merges, special tokens, chat template."""
    parts = {
        "class": type(tokenizer).__name__,
        "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "rules": tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "",
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def one_line(error: Exception) -> str:
    """The message of an error on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
