"""One rank writes; all ranks succeed or fail together, so that none is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from kit.errors import CheckpointError, KitError

Result = TypeVar("Result")

FAILURES = (OSError, SafetensorError, KitError)
"""What reading or writing a checkpoint may raise; anything else is our own bug and ends the process."""


def raise_together(error: Exception | None, doing: str) -> None:
    """Collective. If any rank passes an error, every rank raises CheckpointError with the first one's words."""
    message = None if error is None else _words(error, doing)
    messages: list[str | None] = [message]
    if dist.is_initialized():
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message)
    for text in messages:
        if text is not None:
            raise CheckpointError(text) from error


def together(is_caller: bool, work: Callable[[], Result], doing: str) -> Result | None:
    """Collective. Runs ``work`` on the ranks with ``is_caller``; a failure there is raised on every rank."""
    result, error = None, None
    if is_caller:
        try:
            result = work()
        except FAILURES as failure:
            error = failure
    raise_together(error, doing)
    return result


def _words(error: Exception, doing: str) -> str:
    if isinstance(error, KitError):
        return str(error)
    return f"{doing} failed: {error}; check the free space and the permissions there"
