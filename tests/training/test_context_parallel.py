"""Context parallelism of the torch engine against one process: ring and all-to-alls, by model, positions and layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from kit.cost.memory.offload import offloaded_activation_bytes
from kit.engines.kernels.ring_attention import ring_attention
from kit.specs.job import BalancingSpec
from tests.megatron import shapes
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases

LONGROPE = {"rope_scaling": shapes.LONGROPE | {"original_max_position_embeddings": 24}}
"""24 of 32 positions: with the ring, and with contiguous parts, one of two ranks has no longer position."""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "yarn": ("llama", {"rope_scaling": shapes.YARN}),
    "llama3": ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}}),
    "longrope": ("phi3", LONGROPE),
    "qwen3": ("qwen3", {"tied_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", shapes.DEEPSEEK),
}
LONG = {"recompute": "full", "chunked_loss": True, "activation_offloading": True}
CASES = [
    ("p2p", 2, 1, "yarn", {"zero_stage": 3}),
    ("p2p", 2, 1, "longrope", {"zero_stage": 3, **LONG}),
    ("p2p", 2, 1, "mixtral", {"zero_stage": 2}),
    ("p2p", 2, 1, "qwen3", {"zero_stage": 2, **LONG}),
    ("p2p", 4, 1, "llama3", {"zero_stage": 3, "recompute": "full"}),
    ("p2p", 2, 2, "gpt2", {"zero_stage": 3}),
    ("a2a", 2, 1, "llama3", {"zero_stage": 2}),
    ("a2a", 2, 1, "longrope", {"zero_stage": 3}),
    ("a2a", 2, 1, "deepseek_v3", {"zero_stage": 3}),
    ("a2a", 2, 2, "mixtral", {"zero_stage": 3}),
    ("a2a", 4, 1, "yarn", {"zero_stage": 3, **LONG}),
]
"""``a2a`` on four ranks: two key heads, each on two of them."""


def plans(model, comm_type, cp, dp, **layout):
    """Of the layout, and of one process with the same batch."""
    family, shape = MODELS[model]
    job = {"optimizer": dataclasses.replace(tiny.plan().job.optimizer, eps=1e-3)}
    if model == "mixtral":
        job["balancing"] = BalancingSpec(
            moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.02, moe_z_loss_coeff=0.01
        )
    spec = tiny.model(family, **shape)
    alone = tiny.plan(spec, job=job, micro_batch_size=2, gradient_accumulation_steps=2 * dp)
    # A micro batch of one row has the same balancing loss on one process only with as many micro batches.
    split = {"cp": cp, "cp_comm_type": comm_type, "dp": dp, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    return alone, tiny.plan(spec, job=job, **split, **layout)


@pytest.mark.everyday("llama3-p2p4-dp1", "longrope-a2a2-dp1")
@pytest.mark.parametrize(
    ("comm_type", "cp", "dp", "model", "layout"),
    CASES,
    ids=[f"{model}-{comm_type}{cp}-dp{dp}" for comm_type, cp, dp, model, _ in CASES],
)
def test_agrees_with_one_process(tmp_path, comm_type, cp, dp, model, layout):
    """Gradients, curve and weights; the checkpoint goes on without context parallelism."""
    cases.agree(tmp_path, *plans(model, comm_type, cp, dp, **layout))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "comm_type", "model"),
    [
        ("megatron-ring-forgets-a-part", "p2p", "yarn"),
        ("context-local-positions", "p2p", "yarn"),
        ("context-local-positions", "a2a", "llama3"),
        ("context-length-of-own-part", "p2p", "longrope"),
        ("context-length-of-own-part", "a2a", "longrope"),
        ("context-scaled-by-data-ranks", "a2a", "llama3"),
    ],
)
def test_a_planted_fault_turns_the_comparison_red(tmp_path, fault, comm_type, model):
    assert cases.fault_shows(tmp_path, *plans(model, comm_type, 2, 1, zero_stage=3), fault)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_ring_of_one_is_causal_attention(monkeypatch, scale):
    """Of torch, with fewer key heads; without a scale, by the root of the width. gloo sends nothing to itself."""
    monkeypatch.setattr("kit.engines.kernels.ring_attention._exchange", lambda tensor, group: lambda: tensor)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, heads, 8, 4, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    expected = functional.scaled_dot_product_attention(*tensors, is_causal=True, scale=scale, enable_gqa=True)
    found = ring_attention(*tensors, dist.group.WORLD, scale)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), tensors) for each in (found, expected)))


def test_only_layer_inputs_go_to_the_host(tmp_path):
    """There and back, as many bytes as the plan counts. Here nothing is pinned, which needs an accelerator."""
    plan = tiny.plan(recompute="full", activation_offloading=True)
    found, gradients = pool("torch", 1).run(cases.saved_on_host, tiny.run_directory(tmp_path, plan))[0]
    assert (sum(found), len(found)) == (2 * offloaded_activation_bytes(plan.workload), 2 * plan.model.num_layers)
    assert cases.same(gradients, cases.alone(tmp_path / "one", tiny.plan(recompute="full"))["gradients"])


def test_bf16_of_the_ring_is_close_to_fp32(tmp_path):
    cases.near_in_bf16(tmp_path, *plans("yarn", "p2p", 2, 1, zero_stage=3, **LONG))
