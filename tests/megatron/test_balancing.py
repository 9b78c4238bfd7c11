"""What balances experts, on every kind of layout: gradients, norms and biases of one process that writes it out."""

from __future__ import annotations

import functools

import pytest
import torch

from kit.engines.huggingface import models
from kit.engines.huggingface.buffers import is_buffer
from kit.specs.job import BalancingSpec
from tests.megatron import cases
from tests.megatron.conftest import saved_model, steps
from tests.megatron.shapes import DEEPSEEK
from tests.support import tiny
from tests.support.balance import PlainRouters
from tests.support.workers import pool

TWO_LAYERS = {"num_layers": 2, "vocab_size": 127}
TP2_EP2 = {"tp": 2, "sp": True, "ep": 2}


def balancing(kind, coefficient=0.5, **more):
    return BalancingSpec(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=coefficient, **more)


TORCH = {"engine": "torch", "implementation": "huggingface"}
ZERO = {"engine": "deepspeed", "implementation": "huggingface"}
SEQUENCES = balancing("seq_aux_loss", moe_z_loss_coeff=0.1)
DEEPSEEKS = balancing("seq_aux_loss", moe_router_bias_update_rate=0.05)
CASES = {
    "cp2": ("mixtral", {}, {"cp": 2}, SEQUENCES),
    "pp2-recompute": ("mixtral", {}, {"pp": 2, "recompute": "full"}, SEQUENCES),
    "deepseek-tp2-sp-ep2": ("deepseek_v3", DEEPSEEK, TP2_EP2, DEEPSEEKS),
    "deepseek-pp2": ("deepseek_v3", DEEPSEEK | {"num_layers": 3}, {"pp": 2, "first_stage_layers": 2}, DEEPSEEKS),
    "deepseek-dp2-ep2": (
        "deepseek_v3",
        DEEPSEEK,
        {"dp": 2, "ep": 2, "zero_stage": 1, "micro_batch_size": 4},
        DEEPSEEKS,
    ),
    # These two depend on the layout: what is one micro batch, and how many ranks there are.
    "micro-batches-cp2": ("qwen3_moe", {}, {"cp": 2}, balancing("aux_loss")),
    "micro-batches-dp2-ep2": ("qwen3_moe", {}, {"dp": 2, "ep": 2}, balancing("aux_loss")),
    "torch-ddp-recompute": ("mixtral", {}, TORCH | {"dp": 2, "recompute": "full"}, SEQUENCES),
    "torch-fsdp2-deepseek": ("deepseek_v3", DEEPSEEK, TORCH | {"dp": 2, "zero_stage": 3}, DEEPSEEKS),
    "torch-all-recompute": ("qwen3_moe", {}, TORCH | {"dp": 2, "recompute": "full"}, balancing("global_aux_loss")),
    "zero3-deepseek-recompute": (
        "deepseek_v3",
        DEEPSEEK,
        ZERO | {"dp": 2, "zero_stage": 3, "recompute": "full"},
        DEEPSEEKS,
    ),
    "zero1-all": ("qwen3_moe", {}, ZERO | {"dp": 2, "zero_stage": 1}, balancing("global_aux_loss")),
    "ulysses": ("mixtral", {}, ZERO | {"cp": 2, "cp_comm_type": "a2a", "zero_stage": 2}, SEQUENCES),
    "ulysses-zero3-micro-batches": (
        "qwen3_moe",
        {},
        ZERO | {"cp": 2, "cp_comm_type": "a2a", "zero_stage": 3},
        balancing("aux_loss", moe_z_loss_coeff=0.1),
    ),
    "all-dp2-ep2": ("qwen3_moe", {}, {"dp": 2, "ep": 2, "recompute": "full"}, balancing("global_aux_loss")),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """``directories(spec)``: a directory with a model, beside which run directories go."""

    @functools.cache
    def directory(spec):
        path = tmp_path_factory.mktemp(spec.name)
        saved_model(spec, path / cases.HF_DIRECTORY)
        return path

    return directory


def compare(directories, name, fault=None):
    family, shape, layout, chosen = CASES[name]
    spec = tiny.model(family, **(TWO_LAYERS | shape))
    directory = directories(spec)
    rundir = cases.run_directory(directory / "run", spec, job={"balancing": chosen}, **layout)
    sizes = rundir.plan.layout
    model = models.AutoModelForCausalLM.from_pretrained(directory / cases.HF_DIRECTORY, attn_implementation="sdpa")
    routers = PlainRouters(spec, model, chosen, sizes.dp, sizes.micro_batch_size)
    expected = cases.reference(spec, model, steps(spec), routers=routers)
    found = pool(sizes.engine, sizes.world_size).run(cases.train, rundir, steps(spec), False, fault)[0]
    return cases.differences(found, expected), found, routers


@pytest.mark.everyday("cp2")
@pytest.mark.parametrize("name", CASES)
def test_same_as_one_process(directories, name):
    problems, found, routers = compare(directories, name)
    assert problems == []
    losses = [routers.auxiliary(logits.float().unflatten(0, (8, -1))).item() for logits, _ in routers.seen.values()]
    assert found.routing["router_aux_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert (found.routing["dropped_tokens"], found.routing["dead_experts"]) == (0, 0)


@pytest.mark.everyday("deepseek-dp2-ep2")
@pytest.mark.parametrize("name", ["deepseek-dp2-ep2", "torch-fsdp2-deepseek", "zero3-deepseek-recompute"])
def test_moved_biases_are_in_checkpoints(directories, tmp_path, name):
    family, shape, layout, chosen = CASES[name]
    spec = tiny.model(family, **(TWO_LAYERS | shape))
    rundir = cases.run_directory(directories(spec) / "run", spec, job={"balancing": chosen}, **layout)
    found = cases.resumed(rundir, tmp_path)[0]
    biases = {name for name in found["ended"] if is_buffer(name)}
    assert len(biases) == spec.num_layers - 1
    assert found["same bits"]
    assert all(torch.equal(found["elsewhere"]["ended"][name], found["ended"][name]) for name in biases)


@pytest.mark.everyday(
    "megatron-unscaled-router-losses-pp2-recompute-gradients[model.layers.0.block_sparse_moe.gate.weight]"
)
@pytest.mark.parametrize(
    ("fault", "name", "shows_in"),
    [
        ("megatron-unscaled-router-losses", "pp2-recompute", "gradients[model.layers.0.block_sparse_moe.gate.weight]"),
        ("megatron-loads-of-this-rank", "cp2", "gradients[model.layers.0.block_sparse_moe.gate.weight]"),
        ("megatron-biases-of-this-rank", "deepseek-dp2-ep2", "losses[2]"),
        ("local-expert-loads", "torch-fsdp2-deepseek", "losses[2]"),
        ("router-losses-averaged-twice", "zero1-all", "gradients[model.layers.0.mlp.gate.weight]"),
    ],
)
def test_planted_faults_show(directories, fault, name, shows_in):
    problems, _, _ = compare(directories, name, fault)
    assert any(problem.startswith(shows_in) for problem in problems), problems


def test_transformers_loss_is_larger_by_the_experts_of_a_token_on_one_layer():
    """Its function pools layers, so it is compared on one (modeling_mixtral.py)."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    spec = tiny.model("mixtral", **(TWO_LAYERS | {"num_layers": 1}))
    logits = torch.randn(6, 9, spec.num_experts)
    routers = PlainRouters(spec, torch.nn.Module(), balancing("aux_loss"), dp=1, size=6)
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), spec.num_experts, spec.experts_per_token)
    assert float(theirs) == pytest.approx(spec.experts_per_token * float(routers.auxiliary(logits)), rel=1e-6)


def test_tokens_beyond_the_capacity_are_dropped_and_counted(directories):
    spec = tiny.model("mixtral", **TWO_LAYERS)
    directory = directories(spec)
    chosen = BalancingSpec(moe_expert_capacity_factor=1.0)
    rundir = cases.run_directory(directory / "run", spec, job={"balancing": chosen}, dp=2, ep=2)
    found = pool("megatron", 2).run(cases.train, rundir, 1)[0]
    assert 0 < found.routing["dropped_tokens"] < 0.5
    assert 1 <= found.routing["expert_load_max"] <= 1 / (1 - found.routing["dropped_tokens"])
