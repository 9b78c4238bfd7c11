"""How much training data there is: what one pass over them has, as far as files beside them say it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kit.object_storage import is_address
from kit.specs.job import Objective
from kit.specs.run import DataSpec


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data."""

    samples: int
    """Rows, packed sequences, or windows of text."""
    tokens: int
    """Their tokens, as ``kit convert data`` counts them: without padding."""


def epoch_on_disk(data: DataSpec, objective: Objective) -> Epoch | None:
    """The rows of ``data.train``, which the JSON file beside the pair counts. None where it is not on this disk or is
    of another objective, and for what only the run counts: packs, windows of text, blends."""
    prefix = data.train
    if prefix is None or is_address(prefix) or data.packing or objective == "pretrain":
        return None
    try:
        said = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
        samples, tokens = said["num_documents"], said["num_tokens"]
        known = said["objective"] == objective and type(samples) is type(tokens) is int and min(samples, tokens) > 0
    except (OSError, ValueError, LookupError, TypeError):
        return None  # preflight and the run say what is wrong with it
    return Epoch(samples, tokens) if known else None
