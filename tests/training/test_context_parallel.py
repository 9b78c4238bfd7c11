"""Context parallelism of the torch engine against one process: ring and all-to-alls, by model, positions and layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kit.cost.memory.offload import offloaded_activation_bytes
from kit.cost.workload import Workload
from kit.specs.balancing import BalancingSpec
from tests.megatron import shapes
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.test_torch_engine import relative_error

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


@pytest.mark.everyday("yarn-p2p2-dp1")
@pytest.mark.parametrize(
    ("comm_type", "cp", "dp", "model", "layout"),
    CASES,
    ids=[f"{model}-{comm_type}{cp}-dp{dp}" for comm_type, cp, dp, model, _ in CASES],
)
def test_agrees_with_one_process(tmp_path, comm_type, cp, dp, model, layout):
    """Gradients, curve and weights; the exchange checkpoint goes on without context parallelism."""
    alone, split = plans(model, comm_type, cp, dp, **layout)
    (one,) = pool("torch", 1).run(cases.train_and_export, tiny.run_directory(tmp_path, alone))
    found = pool("torch", cp * dp).run(cases.train_and_export, tiny.run_directory(tmp_path, split), tmp_path / "out")
    assert len({each["first"] for each in found}) == 1
    two = found[0]
    assert two["first"].tokens == one["first"].tokens
    assert two["first"].mean == pytest.approx(one["first"].mean, rel=1e-6)
    for name, gradient in one["gradients"].items():
        found_one = two["gradients"][name]  # a correction bias has none: zeros
        assert torch.equal(found_one, gradient) or relative_error(found_one, gradient) < 1e-5, name
    assert torch.tensor(two["curve"] + two["after"]).allclose(torch.tensor(one["curve"] + one["after"]), rtol=1e-5)
    assert two["evaluated"].mean == pytest.approx(one["evaluated"].mean, rel=1e-6)
    resumed = pool("torch", 1).run(cases.import_and_train, tiny.run_directory(tmp_path, alone), tmp_path / "out")[0]
    assert torch.tensor(resumed["after"]).allclose(torch.tensor(one["after"]), rtol=1e-5)


@pytest.mark.everyday("megatron-ring-forgets-a-part-p2p-yarn")
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
    alone, split = plans(model, comm_type, 2, 1, zero_stage=3)
    (one,) = pool("torch", 1).run(cases.train_and_export, tiny.run_directory(tmp_path, alone))
    two = pool("torch", 2).run(cases.train_with, tiny.run_directory(tmp_path, split), fault)[0]
    worst = max(relative_error(two["gradients"][name], gradient) for name, gradient in one["gradients"].items())
    assert worst > 1e-3


def test_only_layer_inputs_go_to_the_host(tmp_path):
    """There and back, as many bytes as the plan counts. Here nothing is pinned, which needs an accelerator."""
    plan = tiny.plan(recompute="full", activation_offloading=True)
    workload = Workload(plan.model, plan.cluster, plan.job, plan.layout)
    found, gradients = pool("torch", 1).run(cases.saved_on_host, tiny.run_directory(tmp_path, plan))[0]
    assert sum(found) == 2 * offloaded_activation_bytes(workload)
    assert len(found) == 2 * plan.model.num_layers
    without = tiny.plan(recompute="full")
    expected = pool("torch", 1).run(cases.train_and_export, tiny.run_directory(tmp_path, without))[0]["gradients"]
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


def test_bf16_of_the_ring_is_close_to_fp32(tmp_path):
    found = {}
    for precision in ("fp32", "bf16"):
        _, split = plans("yarn", "p2p", 2, 1, zero_stage=3, **LONG)
        plan = dataclasses.replace(split, job=dataclasses.replace(split.job, precision=precision))
        found[precision] = pool("torch", 2).run(cases.train_and_export, tiny.run_directory(tmp_path, plan))[0]
    assert found["bf16"]["first"].mean == pytest.approx(found["fp32"]["first"].mean, rel=1e-2)
    for name, gradient in found["fp32"]["gradients"].items():
        cosine = torch.cosine_similarity(found["bf16"]["gradients"][name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.99, name
