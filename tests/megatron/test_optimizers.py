"""SGD and Muon of megatron-core: weights beside the torch engine's and torch.optim's, bytes, and resumes to the bit.

Muon needs megatron-core 0.19 (``python -m tests.system.megatron_019``). With an older one these tests see
that preflight and the worker refuse it.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from functools import lru_cache

import pytest
import torch

from kit.cost.memory.peak import parts_of
from kit.emit import run_directory
from kit.engines.megatron.muon import mark_matrices
from kit.engines.protocol import StateKind
from kit.errors import RunDirectoryError
from kit.preflight.check_result import require
from kit.preflight.requirements import check_optimizer
from kit.preflight.run_checks import preflight
from kit.specs.job import LoraSpec, OptimizerSpec
from tests.deepspeed.test_optimizers import largest
from tests.megatron import cases
from tests.megatron.checkpoints import after
from tests.megatron.shapes import BY_FAMILY
from tests.support import tiny
from tests.support.checkpoints import export, load
from tests.support.refusals import refusal
from tests.support.workers import WorkerError, pool
from tests.system.parity.faults import planted
from tests.training import cases as training
from tests.training.test_optimizers import RATES, plain_optimizers, relative

JOBS = {
    "sgd": {"optimizer": OptimizerSpec(name="sgd", weight_decay=0.1)},
    "muon": {"optimizer": OptimizerSpec(name="muon", weight_decay=0.1, eps=1e-3)},
}
LAYOUTS = {
    "tp2-sp": {"tp": 2, "sp": True},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
}
CASES = [(name, layout) for name in JOBS for layout in LAYOUTS]
FAMILIES = {
    "tp2-phi3": ("phi3", {"tp": 2}, {}),
    "tp2-gpt2": ("gpt2", {"tp": 2}, {}),
    "pp2-vp2-qwen3": ("qwen3", {"pp": 2, "vp": 2}, {}),
    "dp2-ep2-mixtral": ("mixtral", {"dp": 2, "ep": 2}, {}),
    "tp2-sp-ep2-deepseek": ("deepseek_v3", {"tp": 2, "sp": True, "ep": 2}, {}),
    "tp2-lora": ("llama", {"tp": 2}, {"lora": LoraSpec(rank=3)}),
    "tp2-dp2-llama": ("llama", {"tp": 2, "dp": 2}, {}),
}
BOUND = 1e-5
AFTER_2 = dataclasses.replace(training.COUNTERS, step=2, optimizer_steps=2)
SPEC = tiny.model("llama", num_layers=4, vocab_size=127)
TOO_OLD = (
    r"optimizer\.name=muon on layout\.engine=megatron needs Python 3\.12 or newer \(.* here\), megatron-core 0\.19 "
)


def refused(rundir) -> bool:
    """Whether this environment is too old for the run; then preflight's check must say so."""
    if not check_optimizer(rundir.plan):
        return False
    assert re.search(TOO_OLD, refusal(RunDirectoryError, require, check_optimizer(rundir.plan)))
    return True


@pytest.fixture
def run_of(references):
    """``run_of(optimizer, layout)``: its run directory, or a skip where the installed megatron-core is too old."""

    def run(name, layout, spec=SPEC, **job):
        rundir = cases.run_directory(references(spec)[0] / "run", spec, job=JOBS[name] | job, **layout)
        if refused(rundir):
            pytest.skip("Muon needs megatron-core 0.19: python -m tests.system.megatron_019 installs it")
        return rundir

    return run


def beside_torchs(rundir, fault=None):
    """Inside a worker: three steps, and the same of torch.optim.Muon from the engine's gradients. (found, expected)."""
    with planted(fault):
        engine = training.build(rundir)
    if rundir.plan.job.lora is not None:
        everywhere = [{name: tensor.shape for name, tensor in cases.export(engine, StateKind.MASTER).items()}]
        torch.distributed.broadcast_object_list(everywhere, src=0)
        engine.import_state(StateKind.MASTER, cases.RandomAdapters(everywhere[0], seed=0))
    plain = {name: torch.nn.Parameter(each) for name, each in cases.export(engine, StateKind.MASTER).items()}
    steppers = plain_optimizers("muon", plain) if plain else []
    for step in range(3):
        engine.forward_backward(cases.batches_of(engine, rundir, step))
        gradients, norm = cases.export(engine, StateKind.GRADIENT), engine.gradient_norm()
        for name, parameter in plain.items():
            parameter.grad = gradients[name] * min(1.0, cases.JOB["grad_clip"] / (norm + 1e-6))
        for stepper in steppers:
            stepper.step()
        engine.apply(RATES["muon"])
    found = cases.export(engine, StateKind.MASTER)
    engine.close()
    return found, {name: parameter.detach() for name, parameter in plain.items()}


def continued(engine, rundir, checkpoint, write):
    """The masters after step 3, of a run that writes a checkpoint after 2, or goes on from it."""
    for step in range(3):
        if step == 2:
            if write:
                export(engine, checkpoint, rundir.plan, AFTER_2)
            else:
                load(engine, checkpoint, rundir.plan)
        engine.forward_backward(cases.batches_of(engine, rundir, step))
        engine.apply(RATES["muon"])
    return cases.export(engine, StateKind.MASTER)


def matrices(engine, rundir):
    mark_matrices(engine._resharder)
    return {name: (each.is_qkv, each.qkv_split_shapes) for name, each in engine._resharder.parameters.items()}


def test_muon_is_told_which_rows_are_a_matrix_of_hugging_faces(references):
    """On each of two ranks: one group of two queries, a key and a value of 8 rows; and half of gate and of up."""
    rundir = cases.run_directory(references(SPEC)[0] / "run", SPEC, tp=2)
    for found in pool("megatron", 2).run(cases.inside, rundir, matrices):
        assert {
            "decoder.layers.3.self_attention.linear_qkv.weight": (True, [16, 8, 8]),
            "decoder.layers.3.mlp.linear_fc1.weight": (True, [32, 32]),
            "decoder.layers.3.mlp.linear_fc2.weight": (False, [32]),
        }.items() <= found.items()


@pytest.fixture(scope="module")
def alone(references):
    """``alone(optimizer)``: masters of the torch engine in one process."""

    def masters(name):
        layout = {"engine": "torch", "implementation": "huggingface", "gradient_accumulation_steps": 4}
        rundir = cases.run_directory(references(SPEC)[0] / "torch", SPEC, job=JOBS[name], **layout)
        return pool("torch", 1).run(cases.train, rundir, 3)[0].masters

    return lru_cache(masters)


@pytest.mark.everyday("sgd-tp2-sp")
@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.nightly
def test_layouts_agree_and_resume(run_of, alone, tmp_path, name, layout):
    rundir = run_of(name, LAYOUTS[layout])
    assert largest(pool("megatron", 2).run(cases.train, rundir, 3)[0].masters, alone(name)) < BOUND
    found, *others = cases.resumed(rundir, tmp_path)
    assert training.not_to_the_bit(found) == []
    if layout == "tp2-sp":
        other = cases.run_directory(rundir.path.parent / "adam", SPEC, **LAYOUTS[layout])
        assert re.search(
            f"has the state of optimizer.name={name}, and this run has optimizer.name=adamw",
            refusal(WorkerError, pool("megatron", 2).run, cases.inside, other, after, tmp_path / "step"),
        )
    assert all(float(tensor.abs().max()) > 0 for tensor in found[StateKind.EXP_AVG].values())
    second = {each for each, tensor in found[StateKind.EXP_AVG_SQ].items() if float(tensor.abs().max()) > 0}
    rest = {name for name, t in found["ended"].items() if t.ndim == 1 or "embed" in name or "lm_head" in name}
    assert second == (rest if name == "muon" else set())
    for stage, rank in enumerate([found, *others][: rundir.plan.layout.pp]):
        # The vocabulary of 127 is padded; small norms are whole on every rank.
        planned = parts_of(rundir.plan.workload, stage).states.optimizer
        assert rank["held"]["optimizer"] == pytest.approx(planned, rel=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_each_hugging_face_matrix_is_stepped_as_torchs_muon_does(run_of, name):
    family, layout, job = FAMILIES[name]
    spec = tiny.model(family, **{"num_layers": 4, "vocab_size": 127} | BY_FAMILY.get(family, {}))
    rundir = run_of("muon", layout, spec, **job)
    assert largest(*pool("megatron", rundir.plan.layout.world_size).run(beside_torchs, rundir)[0]) < BOUND


@pytest.mark.nightly
@pytest.mark.parametrize("first", ["torch", "megatron"])
def test_muons_checkpoints_move_between_engines(run_of, tmp_path, first):
    four = {"gradient_accumulation_steps": 4}
    runs = {
        "torch": run_of("muon", {"engine": "torch", "implementation": "huggingface", **four}),
        "megatron": run_of("muon", {"tp": 2, "sp": True, **four}),
    }
    masters = {
        engine: pool(engine, runs[engine].plan.layout.world_size).run(
            cases.inside, runs[engine], continued, tmp_path / "step", engine == first
        )[0]
        for engine in sorted(runs, key=lambda each: each != first)
    }
    assert largest(masters["megatron"], masters["torch"]) < BOUND


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["own shards", "megatron-muon-of-fused-matrices"])
def test_a_muon_of_other_matrices_is_seen(run_of, alone, fault):
    rundir = run_of("muon", LAYOUTS["tp2-sp"])
    if fault == "own shards":
        rundir.settings["optimizer"]["muon_tp_mode"] = "blockwise"
    replaced = fault if fault.startswith("megatron") else None
    found = pool("megatron", 2).run(cases.train, rundir, 3, False, replaced)[0].masters
    assert relative(found, alone("muon")) > 100 * BOUND


@pytest.mark.nightly
@pytest.mark.parametrize("name", JOBS)
def test_a_lost_momentum_is_seen(run_of, tmp_path, name):
    rundir, fault = run_of(name, LAYOUTS["dp2"]), "megatron-lost-momentum"
    found = cases.resumed(rundir, tmp_path, fault)[0]
    assert found["again"] != found["after"] != found["elsewhere"]["after"]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [None, "megatron-muon-of-fused-matrices"])
def test_master_weights_beside_bf16_are_split_too(run_of, fault):
    """torch rounds the matrix and normalises it, megatron-core normalises it and rounds."""
    rundir = run_of("muon", LAYOUTS["tp2-sp"], precision="bf16")
    assert (relative(*pool("megatron", 2).run(beside_torchs, rundir, fault)[0]) < 2e-3) == (fault is None)


@pytest.mark.nightly
def test_the_worker_starts_where_the_installed_versions_suffice_and_nowhere_else(tmp_path):
    plan = tiny.plan(SPEC, job=JOBS["muon"], engine="megatron", implementation="local")
    rundir = run_directory.write(plan, tiny.run_directory_spec(), tmp_path / "run")
    said = refusal(RunDirectoryError, preflight, rundir)  # of the data, in any case
    assert ("needs Python 3.12 or newer" in said) == refused(rundir)
    command = [sys.executable, "-m", "kit.training", str(rundir.path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert ("needs Python 3.12 or newer" in ran.stderr) == refused(rundir)
