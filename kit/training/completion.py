"""What ``kit generate`` answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """A prompt and the text that follows it."""

    prompt: str
    completion: str
