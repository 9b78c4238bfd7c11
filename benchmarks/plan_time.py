"""How long a cold ``kit plan`` or ``kit memory`` takes: one process a measurement, imports included.

    python -m benchmarks.plan_time [--runs 5]

Prints the median and the fastest of some runs, and fails when a median is above the promise of half a second.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time

PROMISE_S = 0.5
CASES = (
    ("llama-3.1-8b", "8xH100", "512"),
    ("llama-3-70b", "64xA100-80", "512"),
    ("llama-3.1-405b", "1024xH100", "2048"),
)


def cold_s(verb: str, model: str, gpus: str, global_batch_size: str) -> float:
    """Seconds of one ``kit plan`` or ``kit memory`` in a new process. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "kit", verb, model, "--gpus", gpus, "--global-batch-size", global_batch_size]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    """0 where every median keeps the promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    kept = True
    for verb, case in itertools.product(("plan", "memory"), CASES):
        seconds = [cold_s(verb, *case) for _ in range(runs)]
        median = statistics.median(seconds)
        kept = kept and median <= PROMISE_S
        times = f"median {median * 1e3:4.0f} ms, fastest {min(seconds) * 1e3:4.0f} ms"
        print(f"{verb:>6} {case[0]:>16} on {case[1]:<12} {times}")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
