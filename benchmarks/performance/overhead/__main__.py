"""What the loop, the data path and checkpoints cost beside the engine.

    python -m benchmarks.performance.overhead [loop|data|saving …]

Exit code 1 where a limit is missed: 1 ms of our own per step (median), data twenty times as fast as an H100 needs for a
model of a billion parameters, a set of ten million documents opened like one of a thousand, asynchronous saves every 20
steps that stall training by at most 5 %.
"""

from __future__ import annotations

import tempfile
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
    parts = {"loop": _loop, "data": _data, "saving": _saving}
    missed = []
    for name in chosen(names, parts):
        with tempfile.TemporaryDirectory(prefix="kit-overhead-") as directory:
            if not parts[name](Path(directory)):
                missed.append(name)
    print(f"MISSED: limits of {', '.join(missed)}" if missed else "every limit is kept")
    return 1 if missed else 0


def _loop(directory: Path) -> bool:
    own = loop.own_time(directory)
    kept = own.cpu_ms <= OWN_MS
    print(
        f"{_mark(kept)} loop: {own.cpu_ms:.3f} ms of processor time of our own per step (median, limit {OWN_MS:g}), "
        f"{own.wall_ms:.3f} ms on the clock; the engine takes {own.engine_ms:.1f} ms"
    )
    return kept


def _data(directory: Path) -> bool:
    needed = data.needed_tokens_per_s()
    print(
        f"       one H100 with a model of a billion parameters takes {needed:,.0f} tokens/s (the planner's prediction)"
    )
    kept = True
    for kind, rate in data.rates(directory).items():
        fast = rate >= DATA_TIMES * needed
        kept &= fast
        print(f"{_mark(fast)} data, {kind}: {rate:,.0f} tokens/s on one core, {rate / needed:,.0f} times")
    found = data.opening(directory)
    constant = found[-1][1] <= OPENING_TIMES * found[0][1]
    told = ", ".join(f"{count:,} documents {ms:.2f} ms" for count, ms in found)
    print(f"{_mark(constant)} opening a set: {told}")
    return kept and constant


def _saving(directory: Path) -> bool:
    kept = True
    for asynchronous in (False, True):
        found = loop.stall(directory, asynchronous)
        good = found.share <= STALL or not asynchronous
        kept &= good
        way = "by a thread" if asynchronous else "at once"
        print(
            f"{_mark(good)} saving {found.checkpoint_mib:.0f} MiB every {loop.EVERY} steps {way}: stalls of "
            f"{found.stall_ms:.0f} ms beside steps of {found.step_ms:.0f} ms, {100 * found.share:.1f} % of the run"
        )
    return kept


def _mark(kept: bool) -> str:
    return "ok    " if kept else "MISSED"


if __name__ == "__main__":
    run(main)
