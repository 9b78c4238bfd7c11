"""What the loop, the data path and checkpoints cost beside the engine.

    python -m benchmarks.performance.overhead [loop|data|saving …]

Exit code 1 where a limit is missed: 1 ms of our own per step (median), data twenty times as fast as an H100 needs for a
model of a billion parameters, a set of ten million documents opened like one of a thousand, asynchronous saves every 20
steps that stall training by at most 5 %.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.performance.overhead import data, loop
from tests.support.program import Names, chosen, run

OWN_MS = 1.0
DATA_TIMES = 20.0
OPENING_TIMES = 3.0
"""The largest set's time over the smallest's: both are milliseconds, and noise of a machine in use is as much."""
STALL = 0.05


def main(names: Names) -> int:
    """0 where every limit is kept."""
    parts, missed = {"loop": _loop, "data": _data, "saving": _saving}, []
    for name in chosen(names, parts):
        with tempfile.TemporaryDirectory(prefix="kit-overhead-") as directory:
            for kept, told in parts[name](Path(directory)):
                print(f"{'ok    ' if kept else 'MISSED'} {told}", flush=True)
                missed += [] if kept else [name]
    print(f"MISSED: limits of {', '.join(dict.fromkeys(missed))}" if missed else "every limit is kept")
    return 1 if missed else 0


def _loop(directory: Path) -> Iterator[tuple[bool, str]]:
    own = loop.own_time(directory)
    yield (
        own.cpu_ms <= OWN_MS,
        f"loop: {own.cpu_ms:.3f} ms of processor time of our own per step (median, limit {OWN_MS:g}), "
        f"{own.wall_ms:.3f} ms on the clock; the engine takes {own.engine_ms:.1f} ms",
    )


def _data(directory: Path) -> Iterator[tuple[bool, str]]:
    """Beside what one H100 takes with a model of a billion parameters, by the planner's prediction."""
    needed = data.needed_tokens_per_s()
    for kind, rate in data.rates(directory).items():
        times = f"{rate / needed:,.0f} times the {needed:,.0f} tokens/s that an H100 takes"
        yield rate >= DATA_TIMES * needed, f"data, {kind}: {rate:,.0f} tokens/s on one core, {times}"
    found = data.opening(directory)
    told = ", ".join(f"{count:,} documents {ms:.2f} ms" for count, ms in found)
    yield found[-1][1] <= OPENING_TIMES * found[0][1], f"opening a set: {told}"


def _saving(directory: Path) -> Iterator[tuple[bool, str]]:
    for asynchronous in (False, True):
        found = loop.stall(directory, asynchronous)
        way = "by a thread" if asynchronous else "at once"
        yield (
            found.share <= STALL or not asynchronous,
            f"saving {found.checkpoint_mib:.0f} MiB every {loop.EVERY} steps {way}: stalls of "
            f"{found.stall_ms:.0f} ms beside steps of {found.step_ms:.0f} ms, {100 * found.share:.1f} % of the run",
        )


if __name__ == "__main__":
    run(main)
