"""Counts a configuration's parameters with transformers, in a separate process; caches the answer by its hash."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kit.errors import SpecError
from kit.files import locked, write_text
from kit.specs.local import user_cache

_COUNTER = "kit.engines.huggingface.count_parameters"
_MOST_SECONDS = 120
"""Time limit. A configuration takes two to five seconds, mostly to import torch, and more on a busy machine."""
_FORMAT = "6"
"""Format of cached answers; answers in another format are ignored."""


def counted(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The answer of ``kit.engines.huggingface.count_parameters``; None without transformers.

    Raises ``SpecError`` if the process gives no answer.
    """
    try:
        installed = version("transformers")
        version("torch")
    except PackageNotFoundError:
        return None
    text = json.dumps(config, sort_keys=True)
    key = hashlib.sha256(f"{_FORMAT} {installed} {text}".encode()).hexdigest()
    file = user_cache("counted") / f"{key}.json"
    try:
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return kept
    except (OSError, ValueError):
        pass
    answer = _asked(text, name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent.with_suffix(".lock")):
            write_text(file, json.dumps(answer))
    except OSError:
        pass  # without a writable cache the next call counts again
    return answer


def _asked(text: str, name: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", _COUNTER],
            input=text,
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise SpecError(
            f"transformers gives no answer for config.json of {name} ({type(error).__name__}); "
            f"to see why: python -m {_COUNTER} < config.json"
        ) from None
    return answer
