"""Finds causes that no single log line shows: a slow rank, a diverging loss. Needs constant memory for any number of
steps."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.log_lines import Place

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
    above: list[tuple[float, int, Place]] = field(default_factory=list)
    """Losses that no later loss went below, lowest first, each with the next step and its place."""
    before: float | None = None

    def add(self, loss: float, step: int, place: Place) -> None:
        """Adds the next loss."""
        if self.before is not None:
            while self.above and self.above[-1][0] >= self.before:
                self.above.pop()
            self.above.append((self.before, step, place))
            if len(self.above) > MOST_TIMES:
                del self.above[1::2]
        self.before = loss
        self.last.append(loss)
        if len(self.last) == 2 * LEVEL:
            self.lowest = min(self.lowest, sorted(list(self.last)[:LEVEL])[LEVEL // 2])

    def left_its_level(self) -> tuple[int, float, float, Place] | None:
        """(first step above, lowest level, last level, place of that step); None if the loss has not diverged."""
        end = list(self.last)[-LEVEL:]
        if not 0 < self.lowest < float("inf") or min(end) <= DIVERGED * self.lowest:
            return None
        _, step, place = next(each for each in reversed(self.above) if each[0] <= DIVERGED * self.lowest)
        return step, self.lowest, statistics.median(end), place


@dataclass
class Zeros:
    """Zeros at the end of the logged losses of one rank."""

    before: float = 0.0
    """The last loss that was not zero."""
    count: int = 0
    first: tuple[int | None, Place] | None = None
    """Step and place of the first zero after it."""

    def add(self, loss: float, step: int | None, place: Place) -> None:
        """Adds the next loss."""
        if loss:
            self.before, self.count = loss, 0
        else:
            self.first = self.first if self.count else (step, place)
            self.count += 1


@dataclass
class Curves:
    """Step times and losses of every rank."""

    times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    where: dict[int, Place] = field(default_factory=dict)
    losses: dict[int | None, Losses] = field(default_factory=lambda: defaultdict(Losses))
    zeros: dict[int | None, Zeros] = field(default_factory=lambda: defaultdict(Zeros))

    def add_loss(self, match: re.Match[bytes], place: Place) -> None:
        """Adds one match of ``LOSS`` or ``BARE_LOSS``."""
        loss, step = float(match["value"]), match.groupdict().get("step")
        self.zeros[place.rank].add(loss, None if step is None else int(step), place)
        if step is not None:
            self.losses[place.rank].add(loss, int(step), place)

    def add_time(self, match: re.Match[bytes], place: Place) -> None:
        """Adds one match of ``TIME``."""
        if place.rank is not None:
            times = self.times[place.rank]
            times.append(float(match["value"]))
            self.where[place.rank] = place
            if len(times) > MOST_TIMES:
                del times[::2]

    def causes(self) -> list[Cause]:
        """Causes that the curves show."""
        return [*_slow_ranks(self.times, self.where), *_divergence(self.losses), *_fell_to_zero(self.zeros)]


def _slow_ranks(times: Mapping[int, list[float]], where: Mapping[int, Place]) -> list[Cause]:
    """Ranks whose own working time per step is longer than that of the others."""
    medians = {rank: statistics.median(values) for rank, values in times.items() if len(values) >= FEWEST_STEPS}
    found = []
    for rank, median in medians.items():
        others = [value for other, value in medians.items() if other != rank]
        if others and median > SLOW * statistics.median(others):
            found.append(
                Cause(
                    cause="slow-rank",
                    meaning=f"works {median:.3g} s a step, the others, who wait, {statistics.median(others):.3g} s",
                    fix="look at clocks, temperature, ECC and neighbours of its GPU (kit doctor), or drain its node",
                    ranks=(rank,),
                    place=where[rank].name,
                    evidence=where[rank].text,
                    weight=2,
                )
            )
    return found


def _fell_to_zero(zeros: Mapping[int | None, Zeros]) -> list[Cause]:
    """A loss that was above ``NOT_YET_ZERO`` and is exactly 0 in every later line; the first such rank only."""
    for logged in zeros.values():
        if logged.count >= FEWEST_STEPS and logged.before > NOT_YET_ZERO and logged.first is not None:
            step, place = logged.first
            return [
                Cause(
                    cause="loss-zero",
                    meaning=f"the loss was {logged.before:.3g} and is exactly 0 since: it is not a number, which the "
                    "Trainer logs as 0, or no label is left",
                    fix="logging_nan_inf_filter=false of the Trainer shows them; bf16 in place of fp16, a lower rate; "
                    "look for samples whose labels are all -100",
                    ranks=() if place.rank is None else (place.rank,),
                    place=place.name,
                    evidence=place.text,
                    weight=3,
                    step=step,
                )
            ]
    return []


def _divergence(losses: Mapping[int | None, Losses]) -> list[Cause]:
    """A loss that rose above its lowest level and did not return; the first such rank only."""
    left = {rank: found for rank, logged in losses.items() if (found := logged.left_its_level()) is not None}
    if not left:
        return []
    step, level, last, place = min(left.values(), key=lambda found: found[0])
    return [
        Cause(
            cause="loss-divergence",
            meaning=f"the loss had come down to {level:.3g}, went up, and is {last:.3g} at the end",
            fix="resume from a checkpoint before that step with a lower rate, a longer warm-up or gradient clipping; "
            "look at the data of that step",
            ranks=tuple(sorted(rank for rank in left if rank is not None)),
            place=place.name,
            evidence=place.text,
            weight=2,
            step=step,
        )
    ]
