"""What ``kit generate`` answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """A prompt and the text that follows it."""

    prompt: str
    completion: str
    chat: bool = False
    """Whether the prompt was a turn of a chat, and the completion is the reply."""
