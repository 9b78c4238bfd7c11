"""``events.jsonl``: what happened to a run beside its steps, one line each, never rewritten.

Spikes, discarded batches and rewinds with the positions of their samples, resumes, checkpoints that failed, stops.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Events:
    """On the main rank; elsewhere it writes nothing."""

    def __init__(self, path: Path, is_main: bool) -> None:
        self._path, self._is_main = path, is_main

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append one line. A disk that is full loses the line, not the run."""
        if not self._is_main:
            return
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, "step": step, **values}
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            print(f"event {event} of step {step} is not on disk: {error}", flush=True)
