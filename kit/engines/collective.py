"""What ranks do together: gather values, write files as one, and agree on every step.

All ranks succeed or fail together, so that none is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from kit.errors import CheckpointError, KitError

Result = TypeVar("Result")

_FAILURES: tuple[type[Exception], ...] = (OSError, SafetensorError, KitError)
"""What reading or writing a checkpoint may raise; anything else is our own bug and ends the process."""


def rank() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


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

    If ``work`` raises one of ``failures`` anywhere, every rank raises the first one, as CheckpointError where it is
    none.
    """
    result, error = None, None
    if takes_part:
        try:
            result = work()
        except failures as failure:
            error = failure if isinstance(failure, CheckpointError) else CheckpointError(_words(failure, doing))
    outcomes = gather((takes_part, error, result), group)
    for _, first, _ in outcomes:
        if first is not None:
            raise first
    return [result for took_part, _, result in outcomes if took_part]  # type: ignore[misc]


def _words(error: Exception, doing: str) -> str:
    if isinstance(error, KitError):
        return str(error)
    line = " ".join(str(error).split()) or type(error).__name__
    return f"{doing} failed: {line}; check the free space and the permissions there"


class StatusAllReduce:
    """Agrees on a few values every step: the largest of each over all ranks. Built once a run, by all ranks together.

    The values are the host's own, so no rank waits for its GPU: gloo sends them once backward is done, beside the
    optimizer, and they are read after it. Every rank reads the same result, so all stop after the same step."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if several else None
        self._values = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self, values: Sequence[float]) -> None:
        """Begin to send this rank's values."""
        self._values = torch.tensor(values, dtype=torch.float64)
        if self._group is not None:
            self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def max(self) -> list[float]:
        """The largest of each value over all ranks; waits for the slowest."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._values.tolist()
