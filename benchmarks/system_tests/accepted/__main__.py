"""``python -m benchmarks.system_tests.accepted [--cases 20000]``: draw plans, check them, and hand all files to the
real parsers."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated, NoReturn

import typer

from benchmarks.program import run
from benchmarks.system_tests.accepted.cases import emitted, problems, random_plan
from benchmarks.system_tests.accepted.parsers import (
    refused_by_accelerate,
    refused_by_deepspeed,
    refused_by_fsdp_plugin,
    refused_by_megatron,
)
from kit.specs import strict_yaml
from kit.training.__main__ import leave


def main(cases: int = 20000, first: Annotated[int, typer.Option(help="first seed")] = 0) -> NoReturn:
    """Leave with 0 where nothing was refused."""
    start = time.process_time()
    found: list[str] = []
    plans = 0
    deepspeed: dict[str, tuple[dict[str, object], int]] = {}
    accelerate: set[str] = set()
    megatron: dict[str, dict[str, object]] = {}
    for seed in range(first, first + cases):
        plan = random_plan(seed)
        if plan is None:
            continue
        plans += 1
        found += [f"seed {seed}: {problem}" for problem in problems(plan)]
        for name, config in emitted(plan).items():
            text = json.dumps(config, sort_keys=True)
            if name == "ds_config.json":
                deepspeed[f"{plan.layout.dp} {text}"] = (config, plan.layout.dp)
            elif name == "accelerate.yaml":
                accelerate.add(strict_yaml.dump(config))
            else:
                megatron[text] = config
    drawn = time.process_time() - start
    print(f"{cases} cases, {plans} with a plan, {drawn:.0f} s of processor time; {len(found)} problems")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29713")
    refused = refused_by_deepspeed(deepspeed.values())
    refused += refused_by_accelerate(accelerate)
    refused += refused_by_fsdp_plugin(text for text in accelerate if "fsdp_config" in text)
    refused += refused_by_megatron(megatron.values())
    print(
        f"distinct files: {len(deepspeed)} ds_config.json, {len(accelerate)} accelerate.yaml, {len(megatron)} "
        f"megatron.yaml; {len(refused)} refused"
    )
    for line in [*found, *refused][:40]:
        print(f"  {line}")
    leave(1 if found or refused else 0)


if __name__ == "__main__":
    run(main)
