"""SGD of megatron-core: its weights beside the torch engine's over layouts, its bytes, and resumes to the bit."""

from __future__ import annotations

import pytest
import torch

from kit.cost.memory.peak import parts_of
from kit.engines.base import StateKind
from kit.specs.job import OptimizerSpec
from tests.megatron import cases
from tests.training import tiny
from tests.workers import WorkerError, pool

JOB = {"optimizer": OptimizerSpec(name="sgd", weight_decay=0.1)}
LAYOUTS = {
    "tp2-sp": {"tp": 2, "sp": True},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
}
SPEC = tiny.model("llama", num_layers=4, vocab_size=127)


def load(rundir, checkpoint):
    """Inside a worker."""
    cases.built(rundir).load(checkpoint)


@pytest.fixture(scope="module")
def alone(references):
    """The torch engine in one process."""
    directory, _ = references(SPEC)
    rundir = cases.run_directory(
        directory / "torch", SPEC, job=JOB, engine="torch", implementation="huggingface", gradient_accumulation_steps=4
    )
    return pool("torch", 1).run(cases.train, rundir, 3)[0].masters


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_and_resume(references, alone, tmp_path, name):
    directory, _ = references(SPEC)
    rundir = cases.run_directory(directory / "run", SPEC, job=JOB, **LAYOUTS[name])
    masters = pool("megatron", 2).run(cases.train, rundir, 3)[0].masters
    error = max(float((masters[each] - tensor).norm() / tensor.norm()) for each, tensor in alone.items())
    print(f"| sgd | {name} | {error:.1e} |")
    assert error < 1e-5
    found = pool("megatron", 2).run(cases.resume, rundir, tmp_path / "checkpoint")[0]
    assert found["native"] == found["imported"] == found["expected"]
    final, after_load, after_import = found["finals"]
    for parameter, tensor in final.items():
        assert torch.equal(after_load[parameter], tensor), parameter
        assert torch.equal(after_import[parameter], tensor), parameter
    if name == "dp2":
        adam = cases.run_directory(directory / "adam", SPEC, **LAYOUTS[name])
        with pytest.raises(WorkerError, match=r"has the state of sgd, and this run has optimizer.name=adamw"):
            pool("megatron", 2).run(load, adam, tmp_path / "checkpoint")
    momentum = found["exported"][StateKind.EXP_AVG]
    assert all(float(tensor.abs().max()) > 0 for tensor in momentum.values())
    assert parts_of(rundir.plan.workload, 0).states.optimizer == pytest.approx(
        4 * sum(tensor.numel() for tensor in momentum.values()) / (1 if name == "dp2" else 2), rel=0.1
    )
