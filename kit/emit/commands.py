"""Commands of kit's own that messages and pages tell a person to run."""

from __future__ import annotations

import shlex

from kit.specs.job import Objective


def convert_data(objective: Objective, source: str, tokenizer: str, out: str) -> str:
    """What writes tokenised data for an objective; ``source`` is a word of the shell's, maybe a pattern."""
    rows = [] if objective == "pretrain" else ["--objective", objective]
    return f"kit convert data {source} {shlex.join(['--tokenizer', tokenizer, *rows, '--out', out])}"
