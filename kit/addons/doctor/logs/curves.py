"""Finds causes that no single log line shows: a slow rank, a diverging loss. Needs constant memory for any number of
steps."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.log_lines import Line

SLOW = 1.5
"""A rank whose median step takes this many times the others' is called slow."""
FEWEST_STEPS = 3
MOST_TIMES = 4096
"""Most step times kept per rank; beyond this, every other one is dropped."""
_STEP = rb"[sS]tep[ =:]+(?P<step>\d{1,18})(?:/\d+)?\b[^\n\r]{0,400}?\b"
_NUMBER = rb"[ =:]+(?P<value>\d+(?:\.\d+)?(?:e[-+]?\d+)?)"
LOSS = re.compile(_STEP + rb"[lL]oss" + _NUMBER)
BARE_LOSS = re.compile(rb"(?:\{'|\blm )loss'?" + _NUMBER.replace(b"+(", b"+'?(", 1))
"""Matches a loss without a step, as transformers' Trainer and Megatron-LM log it; only a fall to zero is looked for."""
TIME = re.compile(_STEP + rb"(?:work|compute)[_ ]time(?:_s)?" + _NUMBER)
"""Matches a rank's own working time of a step. The step time itself is the same on all ranks, since they wait for the
slowest."""
DIVERGED = 1.5
"""A loss has diverged if it ends above this many times its lowest level; a temporary spike does not count."""
NOT_YET_ZERO = 0.1
"""A loss that trains towards zero passes through values below this; one that breaks does not."""
LEVEL = 5
"""Number of logged losses whose median is a level. At the end, this many losses must all be above."""


@dataclass
class Losses:
    """The logged losses of one rank."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=2 * LEVEL))
    lowest: float = float("inf")
    """Lowest level so far, without the last ``LEVEL`` losses."""
    above: list[tuple[float, int, Line]] = field(default_factory=list)
    """Losses that no later loss went below, lowest first, each with the next step and its line."""
    not_zero: float = 0.0
    """The last loss that was not zero."""
    zeros: int = 0
    """Number of zeros after it."""
    first_zero: tuple[int | None, Line] | None = None
    """Step and line of the first of these."""

    def add(self, loss: float, step: int | None, line: Line) -> None:
        """Adds the next loss; without a step only a fall to zero is looked for."""
        self.first_zero = (step, line) if not loss and not self.zeros else self.first_zero
        self.not_zero, self.zeros = (self.not_zero, self.zeros + 1) if not loss else (loss, 0)
        if step is None:
            return
        if self.last:
            while self.above and self.above[-1][0] >= self.last[-1]:
                self.above.pop()
            self.above.append((self.last[-1], step, line))
            if len(self.above) > MOST_TIMES:
                del self.above[1::2]
        self.last.append(loss)
        if len(self.last) == 2 * LEVEL:
            self.lowest = min(self.lowest, sorted(list(self.last)[:LEVEL])[LEVEL // 2])

    def left_its_level(self) -> tuple[int, float, float, Line] | None:
        """(first step above, lowest level, last level, line of that step); None if the loss has not diverged."""
        end = list(self.last)[-LEVEL:]
        if not 0 < self.lowest < float("inf") or min(end) <= DIVERGED * self.lowest:
            return None
        _, step, line = next(each for each in reversed(self.above) if each[0] <= DIVERGED * self.lowest)
        return step, self.lowest, statistics.median(end), line


@dataclass
class Curves:
    """Step times and losses of every rank."""

    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    where: dict[int, Line] = field(default_factory=dict)
    losses: dict[int | None, Losses] = field(default_factory=lambda: defaultdict(Losses))

    def add_loss(self, loss: float, step: int | None, line: Line) -> None:
        """Adds what ``LOSS`` or ``BARE_LOSS`` found."""
        self.losses[line.rank].add(loss, step, line)

    def add_time(self, seconds: float, _: int | None, line: Line) -> None:
        """Adds what ``TIME`` found."""
        if line.rank is not None:
            times = self.times[line.rank]
            times.append(seconds)
            self.where[line.rank] = line
            if len(times) > MOST_TIMES:
                del times[::2]

    def causes(self) -> list[Cause]:
        """Causes that the curves show."""
        return [*_slow_ranks(self.times, self.where), *_divergence(self.losses), *_fell_to_zero(self.losses)]


def _slow_ranks(times: Mapping[int, list[float]], where: Mapping[int, Line]) -> Iterator[Cause]:
    """Ranks whose own working time per step is longer than that of the others."""
    medians = {rank: statistics.median(values) for rank, values in times.items() if len(values) >= FEWEST_STEPS}
    for rank, median in medians.items():
        others = [value for other, value in medians.items() if other != rank]
        if others and median > SLOW * statistics.median(others):
            yield Cause(
                cause="slow-rank",
                meaning=f"works {median:.3g} s a step, the others, who wait, {statistics.median(others):.3g} s",
                fix="look at clocks, temperature, ECC and neighbours of its GPU (kit doctor), or drain its node",
                ranks=(rank,),
                place=where[rank].place,
                evidence=where[rank].text,
                weight=2,
            )


def _fell_to_zero(losses: Mapping[int | None, Losses]) -> Iterator[Cause]:
    """A loss that was above ``NOT_YET_ZERO`` and is exactly 0 in every later line; the first such rank only."""
    for logged in losses.values():
        if logged.zeros >= FEWEST_STEPS and logged.not_zero > NOT_YET_ZERO and logged.first_zero is not None:
            step, line = logged.first_zero
            yield Cause(
                cause="loss-zero",
                meaning=f"the loss was {logged.not_zero:.3g} and is exactly 0 since: it is not a number, which the "
                "Trainer logs as 0, or no label is left",
                fix="logging_nan_inf_filter=false of the Trainer shows them; bf16 in place of fp16, a lower rate; "
                "look for samples whose labels are all -100",
                ranks=() if line.rank is None else (line.rank,),
                place=line.place,
                evidence=line.text,
                weight=3,
                step=step,
            )
            return


def _divergence(losses: Mapping[int | None, Losses]) -> Iterator[Cause]:
    """A loss that rose above its lowest level and did not return; the first such rank only."""
    left = {rank: found for rank, logged in losses.items() if (found := logged.left_its_level()) is not None}
    if left:
        step, level, last, line = min(left.values(), key=lambda found: found[0])
        yield Cause(
            cause="loss-divergence",
            meaning=f"the loss had come down to {level:.3g}, went up, and is {last:.3g} at the end",
            fix="resume from a checkpoint before that step with a lower rate, a longer warm-up or gradient clipping; "
            "look at the data of that step",
            ranks=tuple(sorted(rank for rank in left if rank is not None)),
            place=line.place,
            evidence=line.text,
            weight=2,
            step=step,
        )
