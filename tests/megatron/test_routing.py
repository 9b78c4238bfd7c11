"""Metrics of routers, where ranks differ in tokens, layers and experts: those of one process that writes them out."""

from __future__ import annotations

import math

import pytest
import torch

from kit.specs.job import BalancingSpec
from tests.megatron import cases
from tests.megatron.conftest import saved_model
from tests.megatron.shapes import DEEPSEEK
from tests.support import tiny
from tests.support.balance import PlainRouters
from tests.support.workers import pool

DENSE_FIRST = tiny.model("deepseek_v3", **DEEPSEEK | {"num_layers": 4, "vocab_size": 127})
"""A dense layer, and three with experts: two pipeline stages hold unequal numbers of them."""
EXPERTS = tiny.model("mixtral", num_layers=3, vocab_size=127)
MOVED = {"moe_router_bias_update_rate": 0.05}
SEQUENCES = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5}
Z = {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1}
ZERO = {"engine": "deepspeed", "implementation": "huggingface"}
LAYOUTS = {
    "dp2-pp2-ep2": (DENSE_FIRST, {"dp": 2, "pp": 2, "ep": 2}, MOVED | SEQUENCES),
    "cp2": (DENSE_FIRST, {"cp": 2}, MOVED | Z | SEQUENCES),
    "tp2-sp-ep2": (DENSE_FIRST, {"tp": 2, "sp": True, "ep": 2}, Z),
    "ZeRO-2": (DENSE_FIRST, ZERO | {"dp": 2, "zero_stage": 2}, MOVED | Z | SEQUENCES),
    "ZeRO-2, z-loss": (EXPERTS, ZERO | {"dp": 2, "zero_stage": 2}, Z),
    "ZeRO-3, Ulysses": (EXPERTS, ZERO | {"cp": 2, "cp_comm_type": "a2a", "zero_stage": 3}, Z | SEQUENCES),
}


@pytest.mark.everyday("dp2-pp2-ep2", "ZeRO-2", "ZeRO-2, z-loss", "ZeRO-3, Ulysses")
@pytest.mark.parametrize(("spec", "layout", "balanced"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_metrics_are_those_of_one_process(tmp_path, spec, layout, balanced):
    """Of the second step, in which biases have moved and choices with them."""
    chosen = BalancingSpec(**balanced)
    rundir = cases.run_directory(tmp_path / "run", spec, job={"balancing": chosen}, **layout)
    model, sizes = saved_model(spec, tmp_path / cases.HF_DIRECTORY), rundir.plan.layout
    routers = PlainRouters(spec, model, chosen, sizes.dp, sizes.micro_batch_size)
    expected = cases.reference(spec, model, 2, routers=routers)
    found = pool(sizes.engine, sizes.world_size).run(cases.train, rundir, 2)
    assert cases.differences(found[0], expected) == []
    logits = [each.detach().float().unflatten(0, (cases.GLOBAL_BATCH_SIZE, -1)) for each, _ in routers.seen.values()]
    tokens = [torch.bincount(experts.flatten(), minlength=spec.num_experts) for _, experts in routers.seen.values()]
    share = torch.stack(tokens) / (cases.GLOBAL_BATCH_SIZE * tiny.SEQ_LENGTH * spec.experts_per_token)
    entropy = -torch.special.xlogy(share, share).sum(1) / math.log(spec.num_experts)
    biases = [router.e_score_correction_bias for router in routers.routers if spec is DENSE_FIRST]
    z_loss = sum(float(torch.logsumexp(each, -1).square().mean()) for each in logits) / 3
    by_hand = {
        "expert_load_max": float(share.max()) * spec.num_experts,
        "expert_load_entropy": float(entropy.min()),
        "dead_experts": int((share == 0).sum()),
        "dropped_tokens": 0,
        "router_aux_loss": sum(float(routers.auxiliary(each)) for each in logits) / 3,
        "router_z_loss": z_loss if chosen.moe_z_loss_coeff else 0,
        "expert_bias_range": max(float(each.max() - each.min()) for each in biases) if biases else None,
    }
    for rank in found:
        assert rank.routing == pytest.approx(by_hand, rel=1e-5, abs=1e-12)
