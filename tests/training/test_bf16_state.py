"""Weights, gradients and moments in bf16 on the torch engine: beside fp32, its bytes beside the plan's, and what rounds
how. On DeepSpeed: tests/deepspeed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import kit
from kit.cost.memory.peak import parts_of
from kit.engines.protocol import StateKind
from kit.engines.torch.engine import TorchEngine
from kit.engines.torch.optimizer import Optimizer
from kit.engines.torch.stochastic_rounding import Rounding
from kit.specs.job import OptimizerSpec
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.cases import relative

SHORT = {"optimizer_state_dtype": "bf16", "bf16_stochastic_round": True}
UNIT = 2.0**-8
LAYOUTS = {
    "one process": {"gradient_accumulation_steps": 2},
    "DDP": {"dp": 2},
    "FSDP2": {"dp": 2, "zero_stage": 3},
    "FSDP2 on the host": {"dp": 2, "zero_stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"},
}


def plan(name: str = "adamw", precision: str = "bf16", clip: float = 0.3, **layout):
    job = {"precision": precision, "grad_clip": clip, "optimizer": OptimizerSpec(name=name, eps=1e-2)}
    return tiny.plan(job=job, **layout)


@pytest.mark.everyday("adamw-one process", "adamw-DDP", "adamw-8bit-FSDP2")
@pytest.mark.parametrize(
    ("name", "layout"), [*(("adamw", each) for each in LAYOUTS), ("adamw-8bit", "one process"), ("adamw-8bit", "FSDP2")]
)
def test_it_trains_as_fp32_does_but_for_rounding(tmp_path, name, layout):
    """From weights that are bf16 numbers. Clipped gradients, and an epsilon for which updates follow them. Resumes to
    the bit."""
    path = cases.saved(tmp_path, tiny.plan(), torch.bfloat16)
    expected = cases.alone(tmp_path / "fp32", plan("adamw", "fp32", **LAYOUTS["one process"]), model_path=path)
    chosen = plan(name, **LAYOUTS[layout], **SHORT)
    rundir = tiny.run_directory(tmp_path / "bf16", chosen, model_path=path)
    found = pool("torch", chosen.layout.world_size).run(cases.train, rundir)
    assert all(each["same bits"] and each["after"] == each["again"] for each in found)
    for rank, each in enumerate(found):
        assert (each["first"], each["after"]) == (found[0]["first"], found[0]["after"]), rank
        states = parts_of(chosen.workload, 0).states
        if "offload_param" not in LAYOUTS[layout]:
            assert each["held"] == {
                "weights": states.weights,
                "gradients": states.gradients,
                "optimizer": states.optimizer,
            }
    main = found[0]
    assert relative(main["gradients"], expected["gradients"]) < 2 * UNIT
    assert cases.numbers(main["first"]) == pytest.approx(cases.numbers(expected["first"]), rel=UNIT)
    assert main["evaluated"] == pytest.approx(expected["evaluated"], rel=UNIT)
    assert relative(main[StateKind.MASTER], expected[StateKind.MASTER]) < UNIT
    assert max(relative(main[kind], expected[kind]) for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)) < (
        3 * UNIT if name == "adamw" else 0.02
    )
    # Five steps change the weights by what five steps of fp32 do.
    start = {name: each.float() for name, each in load_file(f"{path}/model.safetensors").items()}
    moved, should = ({n: each["ended"][n] - start[n] for n in start} for each in (main, expected))
    assert relative(moved, should) < 0.1


def after_steps(rundir):
    """What a rank holds after three steps, the shard whose numbers it draws, and whether torch's generator is where
    it was."""
    engine, before = TorchEngine(rundir), torch.random.get_rng_state()
    cases.steps(engine, rundir, 0, 3)
    return cases.own(engine), engine._optimizer._rounding.shard, torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])
def test_replicas_round_alike_and_shards_do_not(tmp_path, name):
    for layout, shards in ((LAYOUTS["DDP"], [0, 0]), (LAYOUTS["FSDP2"], [0, 1])):
        found = pool("torch", 2).run(after_steps, tiny.run_directory(tmp_path / name, plan(name, **layout, **SHORT)))
        assert [shard for _, shard, _ in found] == shards
        assert all(stands for _, _, stands in found)
        assert cases.same(found[0][0], found[1][0]) == (shards == [0, 0])


def moved(name: str, stochastic: bool, seed: int = 0, shard: int = 0, first: int = 1) -> torch.Tensor:
    """How far weights of 1 and -1 move in a step of 2⁻¹² against a gap of 2⁻⁷ above and 2⁻⁸ below."""
    ones = torch.ones(64, 256)
    ones[32:] = -1
    weight = torch.nn.Parameter(ones.bfloat16())
    weight.grad = torch.ones_like(weight)
    spec = OptimizerSpec(name=name, weight_decay=0.0, beta1=0.0, beta2=0.0)
    rounding = Rounding(seed, shard, torch.device("cpu")) if stochastic else None
    optimizer = Optimizer([weight], spec, 1.0, rounding=rounding)
    optimizer.set_steps(first - 1)
    optimizer.step(2.0**-12, None)
    return weight.detach().float() - ones


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])
def test_small_updates_are_lost_to_the_nearest_and_right_in_the_mean_at_random(name):
    assert (moved(name, False) == 0).all()
    found = moved(name, True)
    assert set(found.unique().tolist()) == {0.0, -(2.0**-7), -(2.0**-8)}
    for half, gap in ((found[:32], 2.0**-8), (found[32:], 2.0**-7)):  # away from zero gaps are twice as wide
        share = 2.0**-12 / gap
        assert abs(half.mean() + 2.0**-12) < 4 * (gap * (share * (1 - share) / half.numel()) ** 0.5)
    others = [moved(name, True, seed=1), moved(name, True, shard=1), moved(name, True, first=2)]
    assert not any(torch.equal(found, other) for other in others)
    assert torch.equal(found, moved(name, True))


def test_the_plan_says_what_is_lost():
    """8B on one GPU of 80 GB: 8 bytes a parameter, 6 with moments in 8 bits. Rounded at random unless pinned."""

    def planned(name="adamw", **pins):
        job = kit.JobSpec(objective="sft", seq_length=4096, global_batch_size=8, optimizer=OptimizerSpec(name=name))
        pins = {"engine": "torch", "optimizer_state_dtype": "bf16"} | pins
        return kit.plan("llama-3.1-8b", "1xH100", job, kit.Pins(**pins))

    plans = [planned(), planned("adamw-8bit"), planned(bf16_stochastic_round=False)]
    for found, each in zip(plans, (8, 4 + 2 + 8 / 256, 8), strict=True):
        components = found.predicted.memory[0].components_gib
        held = components["weights"] + components["optimizer"] + found.workload.parameters[0].total * 2 / 2**30
        assert held == pytest.approx(each * 8.03e9 / 2**30, rel=1e-3)
        assert found.predicted.peak_gib < 79
    said = [{each.rule: each.why for each in found.decisions}["optimizer_state_dtype"] for found in plans]
    assert "rounded up or down at random" in said[0]
    assert "may be rounded away" in said[2]
    assert [found.layout.bf16_stochastic_round for found in plans] == [True, True, False]
