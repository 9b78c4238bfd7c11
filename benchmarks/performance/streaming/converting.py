"""One conversion in a process of its own: ``python -m benchmarks.performance.streaming.converting SOURCE FORMAT OUT
MODEL``.

Prints, as JSON, its seconds and the most host memory that it needed at a time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from kit.training.checkpoint.convert import convert
from tests.support.peak_memory import Peak, return_freed_memory


def main() -> None:
    """Convert, measure, print."""
    source, to, out, model = sys.argv[1:]
    import kit.engines.megatron.checkpoint.offline  # noqa: F401 - modules are no part of what is measured

    return_freed_memory()
    with Peak() as peak:
        started = time.perf_counter()
        convert(Path(source), to, Path(out), dtype="float32", model=model)
        seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "grown": peak.grown}))


if __name__ == "__main__":
    main()
