"""What no single line shows: a rank that is slower than the others, a loss that goes up."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence

from kit.diagnose.logs.cause import Cause
from kit.diagnose.logs.patterns import STEP
from kit.diagnose.logs.reading import Line

SLOW = 1.5
"""A rank whose median step takes this many times the others' is called slow."""
FEWEST_STEPS = 3
LOSS = re.compile(r"(?i)\bstep[ =:]+(\d+)(?:/\d+)?\b.*?\bloss[ =:]+(\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b")
DIVERGED = 1.5
"""Times the lowest level that the loss had come to; a spike that goes back is none."""
LEVEL = 5
"""Logged losses whose median is a level, and of which all have to lie above at the end."""


def slow_ranks(lines: Sequence[Line]) -> list[Cause]:
    """A rank whose own steps take longer; where ranks wait for each other only its own clock shows it."""
    times: dict[int, list[float]] = defaultdict(list)
    where: dict[int, Line] = {}
    for line in lines:
        match = STEP.search(line.text)
        if match and line.rank is not None:
            times[line.rank].append(float(match.group(2)))
            where[line.rank] = line
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
                    place=where[rank].place,
                    evidence=where[rank].text.strip()[:200],
                    weight=2,
                )
            )
    return found


def divergence(lines: Sequence[Line]) -> list[Cause]:
    """A loss that left the level it had come to and did not come back; of every rank the one that is told first."""
    losses: dict[int | None, list[tuple[int, float, Line]]] = defaultdict(list)
    for line in lines:
        if match := LOSS.search(line.text):
            losses[line.rank].append((int(match.group(1)), float(match.group(2)), line))
    left: dict[int | None, tuple[int, float, float, Line]] = {}
    for rank, logged in losses.items():
        if (found := _left_its_level(logged)) is not None:
            left[rank] = found
    if not left:
        return []
    step, level, last, line = min(left.values(), key=lambda found: found[0])
    return [
        Cause(
            cause="loss-divergence",
            meaning=f"the loss had come down to {level:.3g}, went up, and is {last:.3g} at the end",
            fix="resume from a checkpoint before that step with a lower rate, a longer warm-up or gradient clipping; "
            "look at the data of that step",
            ranks=tuple(sorted(rank for rank in left if rank is not None)),
            place=line.place,
            evidence=line.text.strip()[:200],
            weight=2,
            step=step,
        )
    ]


def _left_its_level(logged: Sequence[tuple[int, float, Line]]) -> tuple[int, float, float, Line] | None:
    """(first step above, lowest level, last level, line of that step) of one rank's losses; None where all is well."""
    values = [loss for _, loss, _ in logged]
    levels = [statistics.median(values[end - LEVEL : end]) for end in range(LEVEL, len(values) - LEVEL + 1)]
    if not levels or (lowest := min(levels)) <= 0 or min(values[-LEVEL:]) <= DIVERGED * lowest:
        return None
    last_below = max(index for index, loss in enumerate(values) if loss <= DIVERGED * lowest)
    step, _, line = logged[last_below + 1]
    return step, lowest, statistics.median(values[-LEVEL:]), line
