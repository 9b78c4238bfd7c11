"""Each optimizer of the torch engine: beside its plain implementation, over layouts, its bytes, and resumes."""

from __future__ import annotations

import math
import sys
from typing import Any

import bitsandbytes
import pytest
import torch

from kit.cost.memory.peak import parts_of
from kit.engines.protocol import StateKind
from kit.engines.torch import gathered_optimizers
from kit.engines.torch.engine import TorchEngine
from kit.engines.torch.optimizer import build_adamw
from kit.specs.job import OptimizerName, OptimizerSpec
from tests.support import tiny
from tests.support.parameter_shapes import parameter_shapes
from tests.support.workers import pool
from tests.training import cases
from tests.training.cases import relative

RATES: dict[OptimizerName, float] = {
    "adamw": 1e-2,
    "adamw-8bit": 1e-2,
    "paged-adamw-8bit": 1e-2,
    "sgd": 0.1,
    "lion": 1e-3,
    "lion-8bit": 1e-3,
    "adafactor": 1e-2,
    "muon": 1e-2,
}
"""Learning rates with which three steps change the weights by a few hundredths."""
SPLITS = {
    "DDP": {"zero_stage": 0, "dp": 2},
    "FSDP2, stage 2": {"zero_stage": 2, "dp": 2},
    "FSDP2, stage 3": {"zero_stage": 3, "dp": 2},
    "FSDP2, tensor parallel": {"zero_stage": 3, "tp": 2, "gradient_accumulation_steps": 4},
}
TRIED = [
    (name, split)
    for name in RATES
    for split in ("DDP", "FSDP2, stage 3")
    if (name[:5], split) != ("paged", "FSDP2, stage 3")
] + [(name, split) for name in ("muon", "adamw-8bit") for split in ("FSDP2, stage 2", "FSDP2, tensor parallel")]
BOUND = 1e-5
"""Of ‖found − expected‖ / ‖expected‖ over all master weights."""
IN_8_BITS = {"adamw-8bit": 1e-4, "paged-adamw-8bit": 1e-4, "lion-8bit": 5e-3}
"""Lion takes signs: where a rounded moment has another one, a weight is 2 · learning rate off."""
IN_ONE = {"adamw-8bit": BOUND, "paged-adamw-8bit": BOUND, "lion-8bit": BOUND}
"""bitsandbytes' own classes step norms by another kernel."""


def directory(path, name: OptimizerName, **layout: Any) -> tiny.TinyRunDirectory:
    """Matrices of 33 rows are not split evenly; those of 8 bits, halved or not, are whole blocks."""
    spec = tiny.model(**({} if name in IN_8_BITS else {"vocab_size": 129, "ffn_hidden_size": 66}))
    job = {"optimizer": OptimizerSpec(name=name, eps=1e-3), "grad_clip": 0.1}
    return tiny.run_directory(path, tiny.plan(spec, job=job, **({"gradient_accumulation_steps": 2} | layout)))


def alone(name: OptimizerName, path) -> dict[str, Any]:
    """The run in one process, once."""
    rundir = directory(path / "one", name, gradient_accumulation_steps=4)
    return cases.alone(rundir.path, rundir.plan, RATES[name], act=cases.resumed)


def check(found: dict[str, Any], rundir: tiny.TinyRunDirectory) -> None:
    """It resumes to the bit, holds the bytes that are planned, and goes on as another layout would."""
    assert (found["same bits"], found["again"], found["steps"]) == (True, found["after"], 5)
    name, planned = rundir.plan.job.optimizer.name, parts_of(rundir.plan.workload, 0).states.optimizer
    if name == "adafactor":
        # The plan leaves out a few vectors: for matrices this small, a twentieth of the weights.
        weights = 4 * sum(math.prod(shape) for shape in parameter_shapes(rundir.plan.model).values())
        assert planned == 0 < found["held"]["optimizer"] < 0.06 * weights
    else:  # ranks have 65 and 64 rows
        assert found["held"]["optimizer"] == pytest.approx(planned, rel=0 if name in IN_8_BITS else 0.02)
    if found["ended"]:
        # 8 bits round once more.
        assert relative(found["elsewhere"]["ended"], found["ended"]) < (5e-3 if name in IN_8_BITS else 1e-6)


@pytest.mark.parametrize("name", RATES)
def test_one_process(tmp_path, name):
    check(alone(name, tmp_path), directory(tmp_path, name))


@pytest.mark.everyday("muon-FSDP2, tensor parallel", "adafactor-FSDP2, stage 3", "adamw-8bit-FSDP2, stage 3")
@pytest.mark.parametrize(("name", "split"), TRIED)
def test_two_processes_agree_with_one(tmp_path, name, split):
    rundir = directory(tmp_path / "split", name, **SPLITS[split])
    ranks = pool("torch", 2).run(cases.resumed, rundir, RATES[name])
    for found in ranks:
        check(found, rundir)
    bound = 2e-3 if (name, split) == ("adamw-8bit", "FSDP2, tensor parallel") else IN_8_BITS.get(name, BOUND)
    one = alone(name, tmp_path)
    assert relative(ranks[0][StateKind.MASTER], one[StateKind.MASTER]) < bound
    for kind in cases.KINDS[1:] if name.endswith("adamw-8bit") else ():
        # Columns cut by tensor parallelism make other blocks.
        assert relative(ranks[0][kind], one[kind]) < (0.05 if "tensor" in split else 1e-3)


# One process


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", RATES)
def test_steps_are_those_of_the_plain_optimizer(tmp_path, name):
    """torch.optim's and bitsandbytes' on whole tensors, and the paper's Lion; clipped, decay of matrices only."""
    found, plain = beside_plain(directory(tmp_path, name))
    assert relative(found, plain) < IN_ONE.get(name, 1e-7)


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("error:Paged optimizers are not supported on CPU")
def test_what_a_checkpoint_has_beside_fp32_state(tmp_path):
    """Where a moment that is read is rounded: codes and scales, and means of rows and columns. Nothing is said of
    paging where there is nothing to page."""
    engines = {name: TorchEngine(directory(tmp_path / name, name)) for name in RATES}
    found = {name: {key.split(".")[0] for key in each.private_tensors()} for name, each in engines.items()}
    codes = {"exp_avg_codes", "exp_avg_scales"}
    both = codes | {"exp_avg_sq_codes", "exp_avg_sq_scales"}
    eight = {"adamw-8bit": both, "paged-adamw-8bit": both, "lion-8bit": codes}
    assert {name: keys for name, keys in found.items() if keys} == eight | {"adafactor": {"row_var", "col_var"}}


@pytest.mark.usefixtures("one_process")
def test_the_iteration_is_torchs():
    from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

    for shape in ((24, 40), (40, 24)):
        update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        expected = _zeropower_via_newtonschulz(update, (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, 1e-7)
        assert torch.equal(gathered_optimizers.orthogonalised(update.bfloat16()), expected)
        singular = torch.linalg.svdvals(gathered_optimizers.orthogonalised(update))
        assert 0.6 < singular.min() < singular.max() < 1.3


def beside_plain(rundir: tiny.TinyRunDirectory) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Masters after three steps of the engine in one process, and of the plain optimizer on its gradients."""
    engine, name = TorchEngine(rundir), rundir.plan.job.optimizer.name
    plain = {n: torch.nn.Parameter(t) for n, t in cases.state(engine, StateKind.MASTER).items()}
    steppers = plain_optimizers(name, plain)
    for step in range(3):
        engine.forward_backward(cases.batches(engine, rundir, step))
        gradients, norm = cases.state(engine, StateKind.GRADIENT), engine.gradient_norm()
        assert norm > 0.1
        for each, parameter in plain.items():
            parameter.grad = gradients[each] * min(1.0, 0.1 / (norm + 1e-6))
        for stepper in steppers:
            stepper.step()
        engine.apply(RATES[name])
    return cases.state(engine, StateKind.MASTER), {each: parameter.detach() for each, parameter in plain.items()}


class PaperLion(torch.optim.Optimizer):
    """Lion, program 1 of arXiv 2302.06675."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                update = torch.sign(0.9 * momentum + 0.1 * parameter.grad)
                parameter.sub_(group["lr"] * (update + group["weight_decay"] * parameter))
                momentum.mul_(0.95).add_(parameter.grad, alpha=0.05)


def plain_optimizers(name: OptimizerName, parameters: dict[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    rate, adam = RATES[name], {"betas": (0.9, 0.95), "eps": 1e-3}
    if name == "adamw":
        return [torch.optim.AdamW(groups, lr=rate, **adam)]
    if name.endswith("adamw-8bit"):  # paging changes no number
        return [bitsandbytes.optim.AdamW8bit(groups, lr=rate, min_8bit_size=33, **adam)]
    if name == "lion-8bit":
        return [bitsandbytes.optim.Lion8bit(groups, lr=rate, betas=(0.9, 0.95), min_8bit_size=33)]
    if name == "sgd":
        return [torch.optim.SGD(groups, lr=rate, momentum=0.9)]
    if name == "adafactor":
        return [torch.optim.Adafactor(groups, lr=rate, foreach=False)]
    if name == "lion":
        return [PaperLion(groups, {"lr": rate})]
    outside = ("embed", "lm_head", "wte", "wpe")
    hidden = [p for each, p in parameters.items() if p.ndim > 1 and not any(part in each for part in outside)]
    rest = [{**group, "params": [p for p in group["params"] if not any(p is q for q in hidden)]} for group in groups]
    # In fp32, as an fp32 run has it; test_the_iteration_is_torchs says that only the dtype differs.
    return [
        Fp32Muon(hidden, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, **adam),
    ]


class Fp32Muon(torch.optim.Muon):
    """torch's Muon with an iteration in fp32."""

    def step(self, closure=None):
        module = sys.modules["torch.optim._muon"]
        given = module._zeropower_via_newtonschulz
        module._zeropower_via_newtonschulz = lambda update, *_: gathered_optimizers.orthogonalised(update.clone())
        try:
            return super().step(closure)
        finally:
            module._zeropower_via_newtonschulz = given


def test_what_a_gpus_host_keeps_is_stepped_by_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP2 leaves it there. It computes what the others do: test_fused_adamw_steps_the_same."""
    here, elsewhere = (torch.nn.Parameter(torch.zeros(1, device=device)) for device in ("cpu", "meta"))
    for there, parameters, fused in ((False, [here], None), (True, [here], True), (True, [here, elsewhere], None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert build_adamw(parameters, OptimizerSpec(), 1e-3).defaults["fused"] is fused
