"""SGD and Muon of megatron-core: weights beside the torch engine's and torch.optim's, bytes, and resumes to the bit.

Muon needs megatron-core 0.19 (``python -m tests.system.megatron_019``). With an older one these tests see
that preflight and the worker refuse it.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from kit.cost.memory.peak import parts_of
from kit.emit import run_directory
from kit.engines.base import StateKind
from kit.errors import RunDirectoryError
from kit.preflight.check_result import require
from kit.preflight.requirements import check_optimizer
from kit.preflight.run_checks import preflight
from kit.specs.job import LoraSpec, OptimizerSpec
from kit.training.checkpoint.transfer import export_exchange, import_exchange
from tests.megatron import cases
from tests.megatron.shapes import BY_FAMILY
from tests.support import tiny
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
    with pytest.raises(RunDirectoryError, match=TOO_OLD):
        require(check_optimizer(rundir.plan))
    return True


def load(rundir, checkpoint):
    """Inside a worker."""
    cases.built(rundir).load(checkpoint)


def beside_torchs(rundir, fault=None):
    """Inside a worker: three steps, and the same of torch.optim.Muon from the engine's gradients. (found, expected)."""
    with planted(fault):
        engine = cases.built(rundir)
    if rundir.plan.job.lora is not None:
        shapes = {name: tensor.shape for name, tensor in cases.export(engine, StateKind.MASTER).items()}
        everywhere = [shapes]
        torch.distributed.broadcast_object_list(everywhere, src=0)
        engine.import_state(StateKind.MASTER, cases.RandomAdapters(everywhere[0], seed=0))
    plain = {name: torch.nn.Parameter(each) for name, each in cases.export(engine, StateKind.MASTER).items()}
    steppers = plain_optimizers("muon", plain) if plain else []
    for step in range(3):
        engine.forward_backward(cases.micro_batches(rundir.plan.model.vocab_size, step, engine.dp_rank, engine.dp_size))
        gradients, norm = cases.export(engine, StateKind.GRADIENT), engine.gradient_norm()
        for name, parameter in plain.items():
            parameter.grad = gradients[name] * min(1.0, cases.JOB["grad_clip"] / (norm + 1e-6))
        for stepper in steppers:
            stepper.step()
        engine.apply(RATES["muon"])
    found = cases.export(engine, StateKind.MASTER)
    engine.close()
    return found, {name: parameter.detach() for name, parameter in plain.items()}


def continued(rundir, exchange, write):
    """Inside a worker: the masters after step 3, of a run that writes an exchange checkpoint after 2, or goes on from
    it."""
    engine = cases.built(rundir)

    def step(number):
        vocab_size = rundir.plan.model.vocab_size
        engine.forward_backward(cases.micro_batches(vocab_size, number, engine.dp_rank, engine.dp_size))
        engine.apply(RATES["muon"])

    if write:
        step(0)
        step(1)
        export_exchange(engine, exchange, AFTER_2, model=rundir.plan.model)
    else:
        import_exchange(engine, exchange)
    step(2)
    masters = cases.export(engine, StateKind.MASTER)
    engine.close()
    return masters


@pytest.fixture(scope="module")
def alone(references):
    """Optimizer → masters of the torch engine in one process."""
    directory, _ = references(SPEC)
    masters = {}
    for name, job in JOBS.items():
        layout = {"engine": "torch", "implementation": "huggingface", "gradient_accumulation_steps": 4}
        rundir = cases.run_directory(directory / "torch", SPEC, job=job, **layout)
        masters[name] = pool("torch", 1).run(cases.train, rundir, 3)[0].masters
    return masters


@pytest.mark.everyday("sgd-tp2-sp")
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_layouts_agree_and_resume(references, alone, tmp_path, name, layout):
    directory, _ = references(SPEC)
    rundir = cases.run_directory(directory / "run", SPEC, job=JOBS[name], **LAYOUTS[layout])
    if refused(rundir):
        return
    masters = pool("megatron", 2).run(cases.train, rundir, 3)[0].masters
    error = max(float((masters[each] - tensor).norm() / tensor.norm()) for each, tensor in alone[name].items())
    print(f"| {name} | {layout} | {error:.1e} |")
    assert error < BOUND
    ranks = pool("megatron", 2).run(cases.resume, rundir, tmp_path / "checkpoint")
    found = ranks[0]
    assert found["native"] == found["imported"] == found["expected"]
    assert found["native_steps"] == 2
    final, after_load, after_import = found["finals"]
    for parameter, tensor in final.items():
        assert torch.equal(after_load[parameter], tensor), parameter
        assert torch.equal(after_import[parameter], tensor), parameter
    if layout == "dp2":
        other = cases.run_directory(directory / "adam", SPEC, **LAYOUTS[layout])
        with pytest.raises(WorkerError, match=f"has the state of {name}, and this run has optimizer.name=adamw"):
            pool("megatron", 2).run(load, other, tmp_path / "checkpoint")
    assert all(float(tensor.abs().max()) > 0 for tensor in found["exported"][StateKind.EXP_AVG].values())
    second = {each for each, tensor in found["exported"][StateKind.EXP_AVG_SQ].items() if float(tensor.abs().max()) > 0}
    rest = {each for each, tensor in final.items() if tensor.ndim == 1 or "embed" in each or "lm_head" in each}
    assert second == (rest if name == "muon" else set())
    for stage in range(rundir.plan.layout.pp):
        # The vocabulary of 127 is padded; small norms are whole on every rank.
        planned = parts_of(rundir.plan.workload, stage).states.optimizer
        assert ranks[stage]["held"] == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_hugging_face_matrix_is_stepped_as_torchs_muon_does(references, name):
    family, layout, job = FAMILIES[name]
    spec = tiny.model(family, **{"num_layers": 4, "vocab_size": 127} | BY_FAMILY.get(family, {}))
    directory, _ = references(spec)
    rundir = cases.run_directory(directory / "run", spec, job=JOBS["muon"] | job, **layout)
    if refused(rundir):
        return
    found, expected = pool("megatron", rundir.plan.layout.world_size).run(beside_torchs, rundir)[0]
    error = max(float((found[each] - tensor).norm() / tensor.norm()) for each, tensor in expected.items())
    print(f"| muon | {name} | {error:.1e} |")
    assert error < BOUND


@pytest.mark.parametrize("first", ["torch", "megatron"])
def test_muons_exchange_checkpoints_move_between_engines(references, tmp_path, first):
    directory, _ = references(SPEC)
    layouts = {"torch": {"engine": "torch", "implementation": "huggingface"}, "megatron": {"tp": 2, "sp": True}}
    runs = {
        engine: cases.run_directory(directory / engine, SPEC, job=JOBS["muon"], gradient_accumulation_steps=4, **layout)
        for engine, layout in layouts.items()
    }
    if refused(runs["megatron"]):
        return
    masters = {
        engine: pool(engine, rundir.plan.layout.world_size).run(
            continued, rundir, tmp_path / "exchange", engine == first
        )[0]
        for engine, rundir in sorted(runs.items(), key=lambda each: each[0] != first)
    }
    error = max(float((masters["megatron"][each] - to).norm() / to.norm()) for each, to in masters["torch"].items())
    print(f"| muon | exchange from {first} | {error:.1e} |")
    assert error < BOUND


@pytest.mark.parametrize("fault", ["own shards", "megatron-muon-of-fused-matrices"])
def test_a_muon_of_other_matrices_is_seen(references, alone, fault):
    directory, _ = references(SPEC)
    rundir = cases.run_directory(directory / "run", SPEC, job=JOBS["muon"], **LAYOUTS["tp2-sp"])
    if refused(rundir):
        return
    if fault == "own shards":
        rundir.settings["optimizer"]["muon_tp_mode"] = "blockwise"
    replaced = fault if fault.startswith("megatron") else None
    found = pool("megatron", 2).run(cases.train_with_fault, rundir, 3, replaced)[0].masters
    error = relative(found, alone["muon"])
    print(f"| muon | {fault} | {error:.1e} |")
    assert error > 100 * BOUND


@pytest.mark.parametrize("name", JOBS)
def test_a_lost_momentum_is_seen(references, tmp_path, name):
    directory, _ = references(SPEC)
    rundir = cases.run_directory(directory / "run", SPEC, job=JOBS[name], **LAYOUTS["dp2"])
    if refused(rundir):
        return
    found = pool("megatron", 2).run(cases.resume_with_fault, rundir, tmp_path / "checkpoint", "megatron-lost-momentum")[
        0
    ]
    assert found["native"] != found["expected"] != found["imported"]


@pytest.mark.parametrize("fault", [None, "megatron-muon-of-fused-matrices"])
def test_master_weights_beside_bf16_are_split_too(references, fault):
    """torch rounds the matrix and normalises it, megatron-core normalises it and rounds."""
    directory, _ = references(SPEC)
    job = JOBS["muon"] | {"precision": "bf16"}
    rundir = cases.run_directory(directory / "run", SPEC, job=job, **LAYOUTS["tp2-sp"])
    if refused(rundir):
        return
    found, expected = pool("megatron", 2).run(beside_torchs, rundir, fault)[0]
    error = relative(found, expected)
    print(f"| muon | tp2-sp in bf16, {fault} | {error:.1e} |")
    assert (error < 2e-3) == (fault is None)


def test_the_worker_starts_where_the_installed_versions_suffice_and_nowhere_else(tmp_path):
    plan = tiny.plan(SPEC, job=JOBS["muon"], engine="megatron", implementation="local")
    rundir = run_directory.write(plan, tiny.run_directory_spec(), tmp_path / "run")
    with pytest.raises(RunDirectoryError) as said:  # of the data, in any case
        preflight(rundir)
    assert ("needs Python 3.12 or newer" in str(said.value)) == refused(rundir)
    command = [sys.executable, "-m", "kit.training", str(rundir.path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert ("needs Python 3.12 or newer" in ran.stderr) == refused(rundir)
