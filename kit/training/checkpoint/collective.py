"""One rank writes; all ranks succeed or fail together, so that none is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from kit.errors import CheckpointError, KitError

Result = TypeVar("Result")

_FAILURES: tuple[type[Exception], ...] = (OSError, SafetensorError, KitError)
"""What reading or writing a checkpoint may raise; anything else is our own bug and ends the process."""


def gather(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Collective over ``group`` (None: all ranks). The values of its ranks, in rank order; they must pickle."""
    if not dist.is_initialized():
        return [value]
    values: list[Result] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def split_over_ranks(items: list[Result]) -> list[Result]:
    """Returns this rank's part of a list, so that all ranks share the hashing of terabytes."""
    return items[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else items


def run_collectively(
    takes_part: bool,
    work: Callable[[], Result],
    doing: str,
    failures: tuple[type[Exception], ...] = _FAILURES,
    group: dist.ProcessGroup | None = None,
) -> list[Result]:
    """Collective over ``group`` (None: all ranks). Runs ``work`` on the ranks that take part; returns their results,
    on every rank.

    If ``work`` raises one of ``failures`` anywhere, every rank raises CheckpointError with the first one's words.
    """
    result, error = None, None
    if takes_part:
        try:
            result = work()
        except failures as failure:
            error = failure
    outcomes = gather((takes_part, None if error is None else _words(error, doing), result), group)
    for _, words, _ in outcomes:
        if words is not None:
            raise CheckpointError(words) from error
    return [result for took_part, _, result in outcomes if took_part]  # type: ignore[misc]


def _words(error: Exception, doing: str) -> str:
    if isinstance(error, KitError):
        return str(error)
    return f"{doing} failed: {_one_line(error)}; check the free space and the permissions there"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
