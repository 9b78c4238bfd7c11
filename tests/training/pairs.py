"""Small pairs of .bin and .idx, written as a conversion writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kit.training.data.indexed import PairFormat
from kit.training.data.indexed_writer import indexed_writer
from tests.support import tiny


def pair(
    prefix: Path,
    sequences: Iterable[Any],
    objective: Any = "pretrain",
    vocab_size: int = tiny.VOCAB_SIZE,
    **sidecar: Any,
) -> Path:
    """Documents, or with another objective rows of parts. Returns ``prefix``."""
    pair = PairFormat(tokenizer="tiny", vocab_size=vocab_size, objective=objective, **sidecar)
    with indexed_writer(prefix, pair) as writer:
        add = writer.add_document if objective == "pretrain" else writer.add_row
        for each in sequences:
            add(each)
    return prefix
