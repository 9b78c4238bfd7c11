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

PARTS = {"loop": loop.own_time, "data": data.speed, "saving": loop.stalls}


def main(names: Names) -> int:
    """0 where every limit is kept."""
    missed: list[str] = []
    for name in chosen(names, PARTS):
        with tempfile.TemporaryDirectory(prefix="kit-overhead-") as directory:
            for kept, told in PARTS[name](Path(directory)):
                print(f"{'ok    ' if kept else 'MISSED'} {told}", flush=True)
                missed += [] if kept else [name]
    print(f"MISSED: limits of {', '.join(dict.fromkeys(missed))}" if missed else "every limit is kept")
    return 1 if missed else 0


if __name__ == "__main__":
    run(main)
