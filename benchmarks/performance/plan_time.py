"""How long a cold ``kit plan`` or ``kit memory`` takes: one process a measurement, imports included.

    python -m benchmarks.performance.plan_time [--runs 5]

Prints the median and the fastest of some runs, and how many times the fastest bare import of pydantic, typer, rich and
yaml that is. Fails where a median is above its promise (half a second, two for 16,384 GPUs) or a fastest plan above
twice the imports, three times for 16,384 GPUs. Then searches ever more layouts inside one process: the time must not
grow faster than their number.
"""

from __future__ import annotations

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

BARE = "bare imports"


def command(verb: str, model: str, gpus: str) -> tuple[str, ...]:
    """Arguments of Python for ``kit plan`` or ``kit memory``."""
    return ("-m", "kit", verb, model, "--gpus", gpus)


MACHINES = {"llama-3.1-8b": "8xH100", "llama-3-70b": "64xA100-80", "llama-3.1-405b": "1024xH100"}
CASES: dict[str, tuple[tuple[str, ...], float, float]] = {
    BARE: (("-c", "import pydantic, typer, rich, yaml"), math.inf, math.inf),
    **{
        f"{verb} {model} on {gpus}": (
            command(verb, model, gpus),
            0.5,
            2.0 if (verb, model) == ("plan", "llama-3.1-8b") else math.inf,
        )
        for verb in ("plan", "memory")
        for model, gpus in MACHINES.items()
    },
    "plan llama-3.1-405b on 16384xH100": (command("plan", "llama-3.1-405b", "16384xH100"), 2.0, 3.0),
}
"""Name → (arguments of Python, promised seconds, most times the bare imports)."""
PARTS: tuple[dict[str, Any], ...] = (
    *({"engine": "megatron", "tp": tp, "recompute": "full"} for tp in (1, 2, 4, 8)),
    *({"engine": "megatron", "tp": tp} for tp in (1, 2, 4, 8)),
    {"engine": "megatron"},
    {},
)
"""Pins that leave ever more layouts of one model on one cluster to be weighed."""
LINEAR = 1.1
"""Exponent of the time over the number of layouts; a tenth more than one for what caches no longer hold."""


def cold_s(arguments: tuple[str, ...]) -> float:
    """Seconds of a new Python process, which may keep its bytecode. Raises CalledProcessError where it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start


def kept(runs: int) -> bool:
    """Every command's median within its promise, and the fastest of some within its ratio to the fastest bare import:
    they take turns, so that a busy machine slows them alike."""
    turns = [{name: cold_s(arguments) for name, (arguments, *_) in CASES.items()} for _ in range(runs)]
    times = {name: sorted(turn[name] for turn in turns) for name in CASES}
    within = []
    for name, (_, promise_s, ratio) in CASES.items():
        median, fastest = statistics.median(times[name]), times[name][0]
        beside = fastest / times[BARE][0]
        within.append(median <= promise_s and beside <= ratio)
        asked = f" (at most {ratio:g})" * math.isfinite(ratio)
        print(f"{name:>40}: median {median * 1e3:4.0f} ms, fastest {fastest * 1e3:4.0f}, {beside:.2f} times{asked}")
    return all(within)


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
    promised = kept(runs)
    slope = growth()
    print(f"time grows with the number of layouts to the power of {slope:.2f}; at most {LINEAR} is wanted")
    return 0 if promised and slope <= LINEAR else 1


if __name__ == "__main__":
    run(main)
