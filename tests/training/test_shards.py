"""A checkpoint of the torch engine goes on under another layout and number of processes."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kit.specs.job import OptimizerSpec
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases

SAMPLES = 12
"""Of a step: a number that 1, 2, 3 and 4 processes share evenly."""
LAYOUTS = {
    "ddp-2": {"dp": 2},
    "fsdp-4": {"dp": 4, "zero_stage": 3},
    "fsdp-3": {"dp": 3, "zero_stage": 2},
    "fsdp-2": {"dp": 2, "zero_stage": 3},
    "tp-2": {"tp": 2, "zero_stage": 3},
    "tp-2-dp-2": {"tp": 2, "dp": 2, "zero_stage": 2},
    "ring-2": {"cp": 2, "cp_comm_type": "p2p", "zero_stage": 3},
    "one": {},
}


def directory(path: Path, name: str, optimizer: str = "adamw") -> tiny.TinyRunDirectory:
    """Uneven sizes: four processes divide neither 131 rows nor 38."""
    layout: dict[str, Any] = {"micro_batch_size": 1, **LAYOUTS[name]}
    layout["gradient_accumulation_steps"] = SAMPLES // layout.get("dp", 1)
    job = {"optimizer": OptimizerSpec(name=optimizer, eps=1e-3)}
    return tiny.run_directory(path / name, tiny.plan(tiny.model(vocab_size=131, ffn_hidden_size=38), job=job, **layout))


def on(rundir: tiny.TinyRunDirectory, *work: Any) -> Any:
    """What the first rank found."""
    return pool("torch", rundir.plan.layout.world_size).run(work[0], rundir, *work[1:])[0]


@pytest.mark.everyday("fsdp-3 tp-2", "ddp-2 fsdp-3")
@pytest.mark.parametrize(
    "ways",
    [
        "fsdp-4 fsdp-3", "fsdp-4 ddp-2", "fsdp-4 tp-2", "fsdp-4 one", "ddp-2 fsdp-3", "ddp-2 tp-2-dp-2", "ddp-2 ring-2",
        "fsdp-3 tp-2", "tp-2-dp-2 fsdp-3", "tp-2-dp-2 fsdp-2", "tp-2-dp-2 tp-2", "fsdp-2 fsdp-3 muon",
    ],
)  # fmt: skip
def test_every_value_arrives_and_the_curve_goes_on(tmp_path, ways):
    before, after, *optimizer = ways.split()
    wrote = on(directory(tmp_path, before, *optimizer), cases.train)
    found = on(directory(tmp_path, after, *optimizer), cases.resume, tmp_path / before / "later")
    assert found["steps"] == 3
    assert all(cases.same(found["loaded"][kind], wrote[kind]) for kind in cases.KINDS)
    assert cases.numbers(found["after"]) == pytest.approx(
        cases.numbers(wrote["after"]), rel=1e-4 if optimizer else 1e-5
    )


@pytest.mark.parametrize("engine", ["torch", "deepspeed", "megatron"])
def test_ranks_write_different_files_at_a_time(tmp_path, engine):
    """The kernel lets one writer into a file: two that wait for each other take up to ten times as long."""
    stage = 1 if engine == "megatron" else 3
    local = {"implementation": "local"} if engine == "megatron" else {}
    plan = tiny.plan(engine=engine, dp=2, zero_stage=stage, **local)
    first, second = pool(engine, 2).run(kinds_written, tiny.run_directory(tmp_path / "run", plan))
    assert len(first) == len(second) == len(cases.KINDS)
    assert first[0] != second[0]
    assert first[-1] != second[-1]


@pytest.mark.parametrize("engine", ["torch", "megatron"])
def test_ranks_write_columns_of_a_tensor_at_a_time(tmp_path, engine):
    """Their lines lie between each other: a disk that gets those of one rank alone is five times as slow."""
    layout = {"implementation": "local"} if engine == "megatron" else {"zero_stage": 3}
    rundir = tiny.run_directory(tmp_path / "run", tiny.plan(engine=engine, tp=2, **layout))
    first, second = pool(engine, 2).run(tensors_written, rundir)
    columns = [(kind, name) for kind, name, whole_rows in first if not whole_rows]
    assert {name.split(".")[-2] for _, name in columns} == {"o_proj", "down_proj"}
    assert len(columns) == len(cases.KINDS) * 2 * tiny.model().num_layers
    assert first[: len(columns)] == second[: len(columns)] == [(kind, name, False) for kind, name in columns]
    assert first[len(columns)] != second[len(columns)]


def kinds_written(rundir: tiny.TinyRunDirectory) -> list[str]:
    """In the order of this rank."""
    return [*dict.fromkeys(kind for kind, *_ in tensors_written(rundir))]


def tensors_written(rundir: tiny.TinyRunDirectory) -> list[tuple[str, str, bool]]:
    """(kind, name, whether its rows are whole) of blocks in the order of this rank."""
    with closing(cases.build(rundir)) as engine:
        return [
            (block.kind, block.name, block.values.shape[1] * block.shape[0] == math.prod(block.shape))
            for block in engine.export_blocks(cases.KINDS)
        ]
