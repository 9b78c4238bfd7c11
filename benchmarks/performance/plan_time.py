"""How long a cold ``kit plan`` or ``kit memory`` takes: one process a measurement, imports included.

    python -m benchmarks.performance.plan_time [--runs 5]

Prints the median and the fastest of some runs, and fails where a median is above its promise: half a second, two for
16,384 GPUs. Then prints the fastest plan over the fastest bare import of pydantic, typer, rich and yaml, which take
turns, and fails above twice the imports, three times for 16,384 GPUs. Then searches ever more layouts inside one
process: the time must not grow faster than their number.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from kit.planner.request import Request
from kit.planner.search import search
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from tests.support.program import run

PROMISE_S = 0.5
FIRST = ("llama-3.1-8b", "8xH100")
CASES = (FIRST, ("llama-3-70b", "64xA100-80"), ("llama-3.1-405b", "1024xH100"))
LARGEST, LARGEST_PROMISE_S = ("llama-3.1-405b", "16384xH100"), 2.0
RATIOS = {FIRST: 2.0, LARGEST: 3.0}
"""Most times the bare imports that a plan may take."""
PARTS: tuple[dict[str, Any], ...] = (
    *({"engine": "megatron", "tp": tp, "recompute": "full"} for tp in (1, 2, 4, 8)),
    *({"engine": "megatron", "tp": tp} for tp in (1, 2, 4, 8)),
    {"engine": "megatron"},
    {},
)
"""Pins that leave ever more layouts of one model on one cluster to be weighed."""
LINEAR = 1.1
"""Exponent of the time over the number of layouts; a tenth more than one for what caches no longer hold."""


BARE = ("-c", "import pydantic, typer, rich, yaml")


def command(verb: str, model: str, gpus: str) -> tuple[str, ...]:
    """Arguments of Python for ``kit plan`` or ``kit memory``."""
    return ("-m", "kit", verb, model, "--gpus", gpus)


def cold_s(arguments: tuple[str, ...]) -> float:
    """Seconds of a new Python process, which may keep its bytecode. Raises CalledProcessError where it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start


def ratios_kept(runs: int) -> bool:
    """The fastest of some runs over the fastest bare import; they take turns: a busy machine slows them alike."""
    plans = {f"kit plan {model} --gpus {gpus}": (model, gpus) for model, gpus in RATIOS}
    cases = {
        "bare imports of pydantic, typer, rich and yaml": BARE,
        **{name: command("plan", *case) for name, case in plans.items()},
    }
    turns = [{name: cold_s(arguments) for name, arguments in cases.items()} for _ in range(runs)]
    fastest = {name: min(turn[name] for turn in turns) for name in cases}
    times = {name: seconds / min(turn[next(iter(cases))] for turn in turns) for name, seconds in fastest.items()}
    for name, seconds in fastest.items():
        asked = f", at most {RATIOS[plans[name]]:g} are asked" if name in plans else ""
        print(f"{name}: {seconds * 1e3:.0f} ms, {times[name]:.2f} times the bare imports{asked}")
    return all(times[name] <= RATIOS[case] for name, case in plans.items())


def growth() -> float:
    """Search Mixtral on 64 GPUs with more and more of its layouts, print a line each; the slope of log time over log
    layouts. Processor time, the least of three."""
    model, cluster, job = load_model("mixtral-8x7b"), parse_cluster("64xH100"), JobSpec(global_batch_size=1024)
    points = []
    for pins in PARTS:
        asked, seconds = Request(model=model, cluster=cluster, job=job, pins=Pins(**pins)), []
        for _ in range(3):
            start = time.process_time()
            weighed = len(search(asked).considered)
            seconds.append(time.process_time() - start)
        points.append((math.log(weighed), math.log(min(seconds))))
        words = ", ".join(f"{key}={value}" for key, value in pins.items()) or "all"
        each_us = min(seconds) / weighed * 1e6
        print(f"{weighed:>6} layouts weighed ({words}): {min(seconds):.3f} s, {each_us:.0f} µs each")
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def main(runs: int = 5) -> int:
    """0 where every promise is kept and the search grows no faster than what it looks at."""
    kept = True
    promises = [*((*each, PROMISE_S) for each in itertools.product(("plan", "memory"), CASES))]
    for verb, case, promise_s in [*promises, ("plan", LARGEST, LARGEST_PROMISE_S)]:
        seconds = [cold_s(command(verb, *case)) for _ in range(runs)]
        median = statistics.median(seconds)
        kept &= median <= promise_s
        times = f"median {median * 1e3:4.0f} ms, fastest {min(seconds) * 1e3:4.0f} ms"
        print(f"{verb:>6} {case[0]:>16} on {case[1]:<12} {times}")
    kept &= ratios_kept(runs)
    slope = growth()
    print(f"time grows with the number of layouts to the power of {slope:.2f}; at most {LINEAR} is wanted")
    return 0 if kept and slope <= LINEAR else 1


if __name__ == "__main__":
    run(main)
