"""What the program itself could run instead: the same rows, length, method and precision with other choices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kit.addons.configs.entries import Source, word
from kit.addons.configs.reading import Asked
from kit.addons.configs.tables import Table
from kit.addons.configs.workload import Described
from kit.cost.hardware import usable_gib
from kit.cost.memory.offload import HOST_SHARE, host_ram_gib_per_node
from kit.cost.time.step import StepTimer
from kit.errors import SpecError
from kit.planner.search import EQUALLY_FAST, MEMORY_MARGIN

_MOST_MICRO = 128
_MOST_TRIED = 4000


@dataclass(frozen=True)
class Variant:
    """The file with some values changed, and what it then needs."""

    values: Mapping[str, Any]
    """Key of the program → its value. Empty: the file as it is."""
    described: Described
    peak_gib: float
    host_fits: bool | None
    """Whether a node's memory takes what is on the host; None where nobody knows how much it has."""
    step_s: float

    @property
    def fits(self) -> bool:
        """On the GPU, and on the host as far as that is known."""
        return self.peak_gib <= usable_gib(self.described.workload.cluster.gpu) and self.host_fits is not False


def variant(asked: Asked, values: Mapping[str, Any], timer: StepTimer) -> Variant:
    """Raises ``SpecError`` where kit has no figures for it."""
    found = asked.described(values)
    work, room = found.workload, found.workload.cluster.host_ram_gib
    host = host_ram_gib_per_node(work)
    host_fits = None if host and room is None else host <= HOST_SHARE * (room or 0.0)
    return Variant(values, found, found.peak_gib, host_fits, sum(timer.components_s(work).values()))


def variants(asked: Asked, now: Variant) -> Iterator[Variant]:
    """Every variant that keeps what the file asks for, apart from the file as it is."""
    timer, rows = StepTimer(), now.described.workload.layout.global_batch_size
    bounds = {gap.key for gap in now.described.gaps if gap.bound == "least"}
    for values in itertools.islice(_combinations(asked, rows), _MOST_TRIED):
        try:
            found = variant(asked, values, timer)
        except SpecError:
            continue
        kept = found.described.workload.job == now.described.workload.job
        if kept and {gap.key for gap in found.described.gaps if gap.bound == "least"} <= bounds:
            yield found


def _combinations(asked: Asked, rows: int) -> Iterator[dict[str, Any]]:
    table, source = asked.table, asked.source
    axes = [
        [(key, value) for value in values if _differs(source, table, key, value)]
        for key, values in table.choices.items()
    ]
    for chosen in itertools.product(*([None, *axis] for axis in axes)):
        values = dict(pair for pair in chosen if pair is not None)
        try:
            work = asked.described(values).workload
        except SpecError:
            continue
        layout, length = work.layout, work.job.seq_length
        if layout.global_batch_size == rows and values:
            yield values
        for micro in range(1, _MOST_MICRO + 1) if table.batch else ():
            accumulation, left = divmod(rows, layout.dp * micro)
            if not left and (micro, accumulation) != (layout.micro_batch_size, layout.gradient_accumulation_steps):
                told = {
                    "layout.micro_batch_size": micro,
                    "accumulation": accumulation,
                    "job.global_batch_size": rows,
                    "rank_tokens": micro * length,
                    "step_tokens": rows * length,
                }
                batch = {key: told[table.keys[key].field] for key in table.batch}
                yield {**values, **{key: each for key, each in batch.items() if _differs(source, table, key, each)}}


def _differs(source: Source, table: Table, key: str, value: Any) -> bool:
    entry = source.entries.get(key)
    if isinstance(value, list | tuple) and entry is not None:
        return False  # a list that the file has stays as it is
    now = table.keys[key].default if entry is None or entry.value in (None, "") else entry.value
    return word(now) != word(value)


def nearest(found: Iterable[Variant]) -> Variant | None:
    """The fewest changed keys with which it fits; of equals the fastest."""
    return min(_roomy(found), key=lambda each: (each.host_fits is None, len(each.values), each.step_s), default=None)


def fastest(found: Iterable[Variant]) -> Variant | None:
    """The fewest changed keys among those that fit and are about as fast as the fastest."""
    fitting = [each for each in _roomy(found) if each.host_fits]
    most = EQUALLY_FAST * min((each.step_s for each in fitting), default=0.0)
    return min((each for each in fitting if each.step_s <= most), key=lambda each: len(each.values), default=None)


def _roomy(found: Iterable[Variant]) -> list[Variant]:
    """All that fit with room for the error of the predicted peak; where there is none, all that fit."""
    fitting = [each for each in found if each.fits]
    usable = usable_gib(fitting[0].described.workload.cluster.gpu) if fitting else 0.0
    return [each for each in fitting if each.peak_gib * (1 + MEMORY_MARGIN) <= usable] or fitting
