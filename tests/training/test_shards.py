"""A native checkpoint of the torch engine goes on under another layout and number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.engines.base import StateKind
from kit.engines.full_tensors import full_tensors
from kit.specs.job import OptimizerSpec
from tests.support import tiny
from tests.support.workers import pool
from tests.training.batches import micro_batches

SAMPLES = 12
"""Of a step: a number that 1, 2, 3 and 4 processes share evenly."""
KINDS = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
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


def directory(path: Path, name: str, **job: Any) -> tiny.TinyRunDirectory:
    """Uneven sizes: four processes divide neither 131 rows nor 38."""
    layout = {"engine": "torch", "micro_batch_size": 1, **LAYOUTS[name]}
    layout["gradient_accumulation_steps"] = SAMPLES // layout.get("dp", 1)
    spec = tiny.model(vocab_size=131, ffn_hidden_size=38)
    plan = tiny.plan(spec, job={"optimizer": OptimizerSpec(eps=1e-3), **job}, **layout)
    return tiny.run_directory(path, plan)


def two_steps(engine: Any, first: int) -> list[float]:
    """Losses and norms."""
    found = []
    for number in (first, first + 1):
        batches = micro_batches(
            number, mbs=1, accumulation=SAMPLES // engine.dp_size, dp_rank=engine.dp_rank, dp_size=engine.dp_size
        )
        found += [engine.forward_backward(batches).mean, engine.apply(1e-2).gradient]
    return found


def everything(engine: Any) -> dict[StateKind, dict[str, torch.Tensor]]:
    """On the main rank."""
    return {kind: full_tensors(engine, kind) for kind in KINDS}


def write(rundir: tiny.TinyRunDirectory, into: Path) -> tuple[Any, list[float], bool]:
    """Inside a worker: two steps, a checkpoint, two more steps."""
    from kit.engines.torch.engine import TorchEngine

    engine = TorchEngine(rundir)
    two_steps(engine, 0)
    into.mkdir(exist_ok=True)
    torch.distributed.barrier()
    engine.save(into)
    found = everything(engine), two_steps(engine, 2), engine.fits_every_layout
    engine.close()
    return found


def read(rundir: tiny.TinyRunDirectory, checkpoint: Path) -> tuple[Any, list[float], int]:
    """Inside a worker: the checkpoint, and two more steps."""
    from kit.engines.torch.engine import TorchEngine

    engine = TorchEngine(rundir)
    engine.load(checkpoint)
    found = everything(engine), engine.optimizer_steps, two_steps(engine, 2)
    engine.close()
    return found[0], found[2], found[1]


def written(tmp_path: Path, name: str, **job: Any) -> tuple[Any, list[float], bool]:
    rundir = directory(tmp_path / name, name, **job)
    return pool("torch", rundir.plan.layout.world_size).run(write, rundir, tmp_path / f"checkpoint-{name}")[0]


@pytest.mark.everyday("fsdp-4-after0")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp-4", ("fsdp-3", "ddp-2", "tp-2", "one")),
        ("ddp-2", ("fsdp-4", "tp-2-dp-2", "ring-2")),
        ("tp-2-dp-2", ("fsdp-3", "fsdp-2", "tp-2")),
    ],
)
def test_every_value_arrives_and_the_curve_goes_on(tmp_path, before, after):
    state, curve, fits = written(tmp_path, before)
    assert fits
    for name in after:
        rundir = directory(tmp_path / f"after-{name}", name)
        found = pool("torch", rundir.plan.layout.world_size).run(read, rundir, tmp_path / f"checkpoint-{before}")
        again, went_on, steps = found[0]
        assert steps == 2
        assert again.keys() == state.keys()
        for kind, tensors in state.items():
            assert again[kind].keys() == tensors.keys()
            assert all(torch.equal(again[kind][each], tensor) for each, tensor in tensors.items()), (name, kind)
        assert went_on == pytest.approx(curve, rel=1e-5), name


def test_muon_too(tmp_path):
    state, curve, _ = written(tmp_path, "fsdp-2", optimizer=OptimizerSpec(name="muon"), precision="fp32")
    rundir = directory(tmp_path / "after", "fsdp-3", optimizer=OptimizerSpec(name="muon"))
    again, went_on, _ = pool("torch", 3).run(read, rundir, tmp_path / "checkpoint-fsdp-2")[0]
    assert all(torch.equal(again[StateKind.EXP_AVG][name], each) for name, each in state[StateKind.EXP_AVG].items())
    assert went_on == pytest.approx(curve, rel=1e-4)


def test_what_is_not_split_like_its_parameter_fits_one_layout(tmp_path):
    assert not written(tmp_path, "fsdp-2", optimizer=OptimizerSpec(name="adafactor"))[2]


def _without_a_rank(checkpoint: Path) -> None:
    (checkpoint / "state-rank00001.json").unlink()


def _of_another_shape(checkpoint: Path) -> None:
    for path in checkpoint.glob("state-rank*.json"):
        text = json.loads(path.read_text())
        text["boxes"]["model.norm.weight"][0] = [64]
        path.write_text(json.dumps(text))


def _of_an_older_kit(checkpoint: Path) -> None:
    for path in checkpoint.glob("state-rank*.json"):
        text = json.loads(path.read_text())
        del text["boxes"]
        path.write_text(json.dumps(text))


@pytest.mark.everyday("_without_a_rank-values that this rank needs of")
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_without_a_rank, "values that this rank needs of"),
        (_of_another_shape, r"model.norm.weight has shape \[64\] in the checkpoint and \[32\] in the model"),
        (_of_an_older_kit, "such files fit one layout; resume under the plan that wrote them"),
    ],
)
def test_damage_is_named(tmp_path, damage, says):
    written(tmp_path, "fsdp-4")
    damage(tmp_path / "checkpoint-fsdp-4")
    with pytest.raises(Exception, match=says):
        pool("torch", 2).run(read, directory(tmp_path / "after", "fsdp-2"), tmp_path / "checkpoint-fsdp-4")
