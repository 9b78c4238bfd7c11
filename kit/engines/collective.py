"""Collectives on Python values: gather them, run work on several ranks, and agree on a status in every step.

If one rank fails, all ranks raise, so that no rank waits in a collective for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from kit.errors import CheckpointError, KitError

Result = TypeVar("Result")

_FAILURES: tuple[type[Exception], ...] = (OSError, SafetensorError, KitError)
"""Exceptions that reading or writing a checkpoint may raise. Any other exception is a bug and ends the process."""


def rank() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Collective over ``group`` (None: all ranks). Returns the values of the group's ranks, in rank order; values must
    pickle."""
    if not dist.is_initialized():
        return [value]
    values: list[Result] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def split_over_ranks(items: list[Result]) -> list[Result]:
    """Returns this rank's items of a list: every world-size-th item, from the rank's own number on."""
    return items[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else items


def from_own_place(items: Sequence[Result], by_columns: Callable[[Result], bool] = lambda _: False) -> list[Result]:
    """All items, each rank from another one on. Ranks that write common files then start in different ones: writers of
    one file wait for its lock in the kernel.

    ``by_columns``: items of which ranks have some columns each. They come first, in one order on all ranks. Their lines
    lie between each other in the file: where only one rank has written, a disk gets pieces of some KB, five times as
    slow.
    """
    together = [item for item in items if by_columns(item)]
    others = [item for item in items if not by_columns(item)]
    first = len(others) * dist.get_rank() // dist.get_world_size() if dist.is_initialized() else 0
    return [*together, *others[first:], *others[:first]]


def on_all_ranks(
    takes_part: bool,
    work: Callable[[], Result],
    doing: str,
    failures: tuple[type[Exception], ...] = _FAILURES,
    group: dist.ProcessGroup | None = None,
) -> list[Result]:
    """Collective over ``group`` (None: all ranks). Runs ``work`` on the ranks with ``takes_part``; returns the results
    of these ranks, on every rank.

    If ``work`` raises one of ``failures`` on any rank, every rank raises the error of the lowest such rank, as a
    CheckpointError. ``doing`` names the work in the message.
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


def host_group() -> dist.ProcessGroup | None:
    """Collective. A group of all ranks for values on the host, which no rank's GPU delays; None for one process."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return dist.new_group(backend="gloo") if several else None


class StatusAllReduce:
    """All-reduces a few values per step, so that all ranks stop after the same step. The constructor is collective.

    The values are on the host, so no rank waits for its GPU. gloo sends them while the optimizer runs; ``result`` reads
    them after the optimizer."""

    def __init__(self) -> None:
        self._group = host_group()
        self._values: list[torch.Tensor] = []
        self._work: list[dist.Work] = []

    def start(self, maxima: Sequence[float], sums: Sequence[float] = ()) -> None:
        """Start the all-reduce of this rank's values: the largest of each of ``maxima``, the sum of each of
        ``sums``."""
        self._values = [torch.tensor(values, dtype=torch.float64) for values in (maxima, sums)]
        if self._group is not None:
            for values, how in zip(self._values, (dist.ReduceOp.MAX, dist.ReduceOp.SUM), strict=True):
                if len(values):
                    self._work.append(dist.all_reduce(values, how, group=self._group, async_op=True))

    def result(self) -> tuple[list[float], list[float]]:
        """Wait for all ranks; return (maxima, sums) over the ranks."""
        for work in self._work:
            work.wait()
        self._work = []
        maxima, sums = self._values
        return maxima.tolist(), sums.tolist()
