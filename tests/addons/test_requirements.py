"""What a plan asks of a machine (machines/needs)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.addons.doctor.machines.needs import requirements_of
from kit.cost.reliability import checkpoint_bytes
from kit.emit.run_directory import write
from kit.specs.run import BlendedSetSpec, CheckpointSpec, DataSpec, RunSpec
from tests.emit.plans import DENSE, FSDP2, ON_CPU, ZERO2, ZERO3, plan_of

TRAIN = ("/data/a.bin", "/data/a.idx")
ZEROS = ("torch", "transformers", "deepspeed", "accelerate")
REQUIRED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero3 to disks": (
        ZERO3 | {"cluster": "dgx-h100:2", "dp": 16, "offload_optimizer": "nvme"},
        {"packages": (*ZEROS, "s3fs"), "cuda": True, "gpus_per_node": 8, "cpu_adam": True, "num_nodes": 2},
    ),
    "zero3 to the host": (ZERO3 | {"offload_param": "cpu"}, {"cpu_adam": True, "nvme_gib": 0.0, "num_nodes": 1}),
    "zero2 to the host": (ZERO2 | {"offload_optimizer": "cpu"}, {"cpu_adam": True}),
    "zero2": (ZERO2 | {"cluster": "8xMI300X"}, {"cpu_adam": False, "cuda": False, "host_gib": 0.0}),
    "zero over megatron": (
        ZERO2 | {"dp": 2, "tp": 4, "implementation": "local"}, {"packages": (*ZEROS, "megatron-core", "s3fs")}
    ),
    "megatron": (
        DENSE | {"cluster": "16xH100", "offload_optimizer": "cpu"},
        {"packages": ("torch", "transformers", "megatron-core", "s3fs"), "cpu_adam": False},
    ),
    "fsdp2 on a part of a node": (
        FSDP2 | {"dp": 4}, {"packages": ("torch", "transformers", "s3fs"), "gpus_per_node": 4},
    ),
    "cpus": (FSDP2 | ON_CPU, {"cuda": False, "gpu_gib": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", REQUIRED)
def test_what_a_plan_asks_of_a_machine(case: str, tmp_path: Path) -> None:
    plan, expected = REQUIRED[case]
    made = plan_of("llama-3.2-1b", **plan)
    run = RunSpec(
        data=DataSpec(train="/data/a", validation="s3://bucket/b"), nvme_path="/disk", model_path="/m",
        checkpoint=CheckpointSpec(keep_last=3),
    )  # fmt: skip
    place, peak = tmp_path / "run", made.predicted.peak_gib
    found = requirements_of(write(made, run, place))
    expected = {
        "gpu_gib": peak, "nvme_gib": made.predicted.nvme_gib_per_node, "nvme_path": "/disk",
        "host_gib": made.predicted.host_ram_gib_per_node + 2 * peak * (case == "cpus"),
        "checkpoint_directory": str(place),
        "paths": (str(place / "plan.yaml"), str(place / "run.yaml"), *TRAIN, "/m/config.json"),
    } | expected  # fmt: skip
    assert {key: getattr(found, key) for key in expected} == expected
    # three that are kept, and one more during a save
    assert found.checkpoints_gib == pytest.approx(4 * checkpoint_bytes(made.workload) / 2**30)
    alone = replace(run, steps=5, data=DataSpec(blend={"x": BlendedSetSpec(path="/data/a", weight=1)}), model_path=None)
    asked = requirements_of(write(made, alone, tmp_path / "alone"))
    assert ("s3fs" in asked.packages, asked.paths[2:]) == (False, TRAIN)
