"""The torch engine: gradients against plain torch, one process against several, the rules every engine obeys."""

from __future__ import annotations

import dataclasses
import math
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from kit.engines import build_engine
from kit.engines.huggingface.inputs import call_arguments
from kit.engines.huggingface.models import build_skeleton, random_model
from kit.engines.huggingface.random_weights import RandomWeights
from kit.engines.protocol import IGNORE_INDEX, StateKind
from kit.engines.torch.engine import TorchEngine, _device
from kit.engines.torch.tensor_parallel import cut
from kit.engines.torch.transformers_plan import styles_of
from kit.errors import CheckpointError, EngineError
from kit.specs.job import BalancingSpec, LoraSpec, OptimizerSpec
from tests.support import tiny
from tests.support.parameter_shapes import parameter_shapes
from tests.support.refusals import refusal
from tests.support.workers import pool
from tests.training import cases
from tests.training.batches import micro_batches, sample

EPS = OptimizerSpec(eps=1e-3)
"""Large: early Adam is sign descent, which makes much of rounding."""
BATCH = micro_batches(0, mbs=2, accumulation=1)
UNEVEN = {"vocab_size": 131, "ffn_hidden_size": 38}
"""Rows that two ranks do not share evenly."""

CAPPED = {
    "logit_softcap": 3.0, "attention_softcap": 50.0, "sliding_window": 16, "tied_embeddings": True,
    "query_pre_attn_scalar": 8,
}  # fmt: skip

BALANCED = {
    "balancing": BalancingSpec(
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.02, moe_z_loss_coeff=0.01
    )
}


def engine_of(path, spec=None, **plan) -> TorchEngine:
    return TorchEngine(tiny.run_directory(path, tiny.plan(spec, **plan)))


# One process


@pytest.mark.usefixtures("one_process")
def test_a_process_has_the_device_of_its_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (_device("cuda"), _device("cpu")) == (torch.device("cuda", 3), torch.device("cpu"))


@pytest.mark.usefixtures("one_process")
def test_gradient_is_of_the_mean_over_all_tokens_of_the_step(tmp_path):
    rundir = tiny.run_directory(tmp_path, tiny.plan(micro_batch_size=2, gradient_accumulation_steps=3))
    engine, model = TorchEngine(rundir), random_model(rundir.plan.model, rundir.run.seed)
    loss = engine.forward_backward(micro_batches(0, mbs=2, accumulation=3))
    inputs, labels = (torch.stack(column) for column in zip(*map(sample, range(6)), strict=True))
    mean = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
    mean.backward()
    assert (loss.tokens, loss.mean) == ((labels != IGNORE_INDEX).sum(), pytest.approx(mean.item(), rel=1e-6))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert cases.worst(cases.state(engine, StateKind.GRADIENT), expected) < 1e-5


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("grad_clip", [0.05, 0.0])
def test_step_is_adamw_with_clipping_and_no_decay_of_vectors(tmp_path, grad_clip):
    engine = engine_of(tmp_path, tiny.model("qwen2"), job={"grad_clip": grad_clip})
    engine.forward_backward(BATCH)
    before, gradients = (cases.state(engine, kind) for kind in (StateKind.MASTER, StateKind.GRADIENT))
    norm, spec = engine.apply(1e-2).gradient, OptimizerSpec()
    assert norm == pytest.approx(sum(g.double().square().sum() for g in gradients.values()).sqrt().item(), rel=1e-6)
    assert norm > 0.05, "clipping must be active for this test to say anything"
    scale = grad_clip / (norm + 1e-6) if grad_clip else 1.0
    after, exp_avg = cases.state(engine, StateKind.MASTER), cases.state(engine, StateKind.EXP_AVG)
    for name, weight in before.items():
        gradient = gradients[name] * scale
        # First step of Adam with bias correction: m̂ = g, v̂ = g² (Kingma & Ba 2015, algorithm 1)
        decay = 1 - 1e-2 * (spec.weight_decay if weight.ndim > 1 else 0)
        expected = weight * decay - 1e-2 * gradient / (gradient.abs() + spec.eps)
        torch.testing.assert_close(after[name], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(exp_avg[name], (1 - spec.beta1) * gradient, rtol=1e-5, atol=1e-9)
    assert engine.optimizer_steps == 1


@pytest.mark.usefixtures("one_process")
def test_recompute_runs_each_layer_twice_and_gives_the_same_gradients(tmp_path):
    calls, found = [], []
    for recompute in ("none", "full"):
        engine = engine_of(tmp_path, recompute=recompute)
        norm = engine.modules()["model.layers.0.input_layernorm"]
        norm.register_forward_hook(lambda *_, recompute=recompute: calls.append(recompute))
        engine.forward_backward(BATCH)
        found.append(cases.state(engine, StateKind.GRADIENT))
    assert calls == ["none", "full", "full"]
    assert cases.same(*found)


@pytest.mark.usefixtures("one_process")
def test_bf16_autocasts_and_keeps_fp32_parameters(tmp_path):
    whole, short = (engine_of(tmp_path, job={"precision": each}) for each in ("fp32", "bf16"))
    expected, found = (engine.forward_backward(BATCH).mean for engine in (whole, short))
    assert expected != found == pytest.approx(expected, rel=1e-2)
    assert {each.dtype for each in cases.own(short).values()} == {torch.float32}


@pytest.mark.usefixtures("one_process")
def test_evaluate_touches_nothing(tmp_path):
    engine = engine_of(tmp_path)
    before = cases.own(engine)
    assert engine.evaluate(BATCH) == engine.forward_backward(BATCH)
    assert (cases.same(cases.own(engine), before), engine.optimizer_steps) == (True, 0)


@pytest.mark.usefixtures("one_process")
def test_losses_are_added_in_fp64(tmp_path, monkeypatch):
    """In fp32 1 is lost beside 2^24."""
    engine, losses = engine_of(tmp_path, gradient_accumulation_steps=3), iter([2.0**24, 1.0, 1.0] * 2)
    weight = engine.modules()["model.norm"].weight
    monkeypatch.setattr(engine, "_loss", lambda *_, **__: weight.sum() * 0 + next(losses))
    assert [run(BATCH * 3).loss_sum for run in (engine.evaluate, engine.forward_backward)] == [2**24 + 2] * 2


@pytest.mark.usefixtures("one_process")
def test_evaluation_draws_no_random_number(tmp_path):
    """Adapters have dropout: in training alone."""
    plan = tiny.plan(job={"lora": LoraSpec(rank=4, dropout=0.5)})
    engine = TorchEngine(tiny.run_directory(tmp_path, plan, model_path=cases.saved(tmp_path, tiny.plan())))
    for run, draws in ((engine.evaluate, False), (engine.forward_backward, True)):
        before = torch.get_rng_state()
        run(BATCH)
        assert torch.equal(torch.get_rng_state(), before) != draws


@pytest.mark.usefixtures("one_process")
def test_what_is_not_the_turn_of_a_call_is_refused(tmp_path):
    """Two steps at once, gradients that nobody made, a step of masked labels alone, which leaves nothing."""
    engine = engine_of(tmp_path)
    masked = [dataclasses.replace(BATCH[0], labels=torch.full_like(BATCH[0].labels, IGNORE_INDEX))]
    assert [
        "no label of this step counts" in refusal(EngineError, run, masked)
        for run in (engine.evaluate, engine.forward_backward)
    ] == [True] * 2
    assert "has no gradient" in refusal(EngineError, next, engine.export_blocks([StateKind.GRADIENT]))
    assert "call forward_backward before apply" in refusal(EngineError, engine.apply, 1e-2)
    engine.forward_backward(BATCH)
    assert "gradients of an earlier step" in refusal(EngineError, engine.forward_backward, BATCH)
    engine.discard()
    assert (engine.memory_bytes()["gradients"], engine.optimizer_steps) == (0, 0)


@pytest.mark.usefixtures("one_process")
def test_losses_of_a_blends_sets_add_up_to_the_steps(tmp_path):
    """Micro batches of set 2, of 5 and of 2 again; one of several sets belongs to none."""
    engine = engine_of(tmp_path, gradient_accumulation_steps=4)
    found, sets = micro_batches(0, mbs=2, accumulation=4), (2, 5, 2, None)
    total = engine.forward_backward([dataclasses.replace(b, data_set=n) for b, n in zip(found, sets, strict=True)])
    mixed = engine.evaluate(found[3:])
    sums, labels = zip(*engine.set_sums.values(), strict=True)
    counted = [int((batch.labels != IGNORE_INDEX).sum()) for batch in found]
    assert ([*engine.set_sums], labels) == ([2, 5], (counted[0] + counted[2], counted[1]))
    assert sum(sums) == pytest.approx(total.loss_sum - mixed.loss_sum, rel=1e-6)
    assert sums[1] == pytest.approx(engine.evaluate(found[1:2]).loss_sum, rel=1e-6)


@pytest.mark.usefixtures("one_process")
def test_starts_from_the_weights_of_a_directory(tmp_path):
    path = cases.saved(tmp_path, tiny.plan())
    donor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    master = cases.state(TorchEngine(tiny.run_directory(tmp_path, model_path=path)), StateKind.MASTER)
    assert cases.same(master, dict(donor.named_parameters()))
    other = tiny.run_directory(tmp_path, tiny.plan(tiny.model(ffn_hidden_size=48)), model_path=path)
    assert re.search(r"mlp\.\w+_proj\.weight has shape", refusal(CheckpointError, TorchEngine, other))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"pp": 2}, "pp=2 on engine=torch"),
        ({"tp": 2}, "tp=2 on engine=torch needs FSDP2"),
        ({"zero_stage": 1}, "zero_stage=1"),
        ({"offload_param": "cpu"}, "offload_param=cpu"),
        ({"dp": 2}, "1 processes for a plan of 2"),
        ({"engine": "megatron"}, "implementation=huggingface cannot run on engine=megatron"),
    ],
)
def test_plans_it_cannot_run_are_refused(tmp_path, layout, message):
    assert message in refusal(EngineError, build_engine, tiny.run_directory(tmp_path, tiny.plan(**layout)))


@pytest.mark.parametrize(
    ("family", "says"),
    [("gpt2", "is empty; use"), ("mixtral", "has moe_tp_experts, packed_colwise, which kit does not support")],
)
def test_tensor_parallelism_that_transformers_does_not_plan_is_refused(family, says):
    said = refusal(EngineError, cut, build_skeleton(tiny.model(family)), mock.Mock(size=lambda: 2))
    assert re.search(f"tp=2 on engine=torch: transformers' plan for .* {says}", said)


def test_a_plan_styles_whole_names_of_any_layer():
    of_plan = [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 10)]
    others = [f"{of_plan[0]}.base_layer", f"{of_plan[0]}ector", f"x{of_plan[0]}", "model.layers.x.mlp.up_proj"]
    assert styles_of(
        build_skeleton(tiny.model()), "tp", 2, ("colwise", "rowwise"), [*others, *of_plan], ""
    ) == dict.fromkeys(of_plan, "colwise")


TWO = {
    "DDP": ("llama", UNEVEN, {}),
    "DDP, tied head, chunked loss": ("gpt2", {}, {"chunked_loss": True}),
    "DDP, capped logits, chunked loss": ("gemma2", CAPPED, {"chunked_loss": True}),
    "DDP, experts, recompute": ("mixtral", {}, {"recompute": "full"}),
    "DDP, compiled": ("llama", {}, {"compile_layers": True}),
    "stage 2, experts": ("mixtral", {}, {"zero_stage": 2}),
    "stage 2, tied head": ("gpt2", {}, {"zero_stage": 2}),
    "stage 3, experts": ("mixtral", {}, {"zero_stage": 3, "recompute": "full"}),
    "stage 3, tied head": ("gpt2", {}, {"zero_stage": 3}),
    "stage 3, on the host": (
        "llama", UNEVEN, {"zero_stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"},
    ),
    "stage 3, uneven, all flags": (
        "llama", UNEVEN, {"zero_stage": 3, "recompute": "full", "chunked_loss": True, "compile_layers": True},
    ),
}  # fmt: skip
"""Name → family, sizes, layout."""


@pytest.mark.everyday("DDP, capped logits, chunked loss", "stage 2, experts", "stage 3, uneven, all flags")
@pytest.mark.parametrize(("family", "sizes", "layout"), TWO.values(), ids=TWO)
def test_two_processes_agree_with_one(tmp_path, family, sizes, layout):
    """Masked labels differ from rank to rank, so a mean of per-rank means would not pass. FSDP2 really shards: ranks
    together hold each element once, under DDP each holds all."""
    spec, job = tiny.model(family, **sizes), {"optimizer": EPS, **(BALANCED if family == "mixtral" else {})}
    one = tiny.plan(spec, job=job, gradient_accumulation_steps=4)
    ranks = cases.agree(tmp_path, one, tiny.plan(spec, job=job, dp=2, gradient_accumulation_steps=2, **layout))
    of_all = (1 if "zero_stage" in layout else 2) * 4 * sum(map(math.prod, parameter_shapes(spec).values()))
    held = {kind: sum(rank["held"][kind] for rank in ranks) for kind in ranks[0]["held"]}
    assert held == {"weights": of_all, "gradients": of_all, "optimizer": 2 * of_all}


TENSOR_PARALLEL = {
    "random": ("llama", 1, False), "random, tied": ("qwen2", 1, False), "from disk": ("llama", 1, True),
    "from disk, tied, x dp": ("qwen2", 2, True),
}  # fmt: skip
"""Name → family, dp, whether the weights are those of a directory."""


@pytest.mark.everyday("from disk, tied, x dp")
@pytest.mark.parametrize(("family", "dp", "from_disk"), TENSOR_PARALLEL.values(), ids=TENSOR_PARALLEL)
def test_tensor_parallelism_agrees_with_one_process(tmp_path, family, dp, from_disk):
    """And its checkpoint goes on without it: names and shapes are those of whole parameters. With dp = 2,
    rows that tensor parallelism splits are split again by FSDP2."""
    spec, job = tiny.model(family, tied_embeddings=family == "qwen2"), {"optimizer": EPS}
    one = tiny.plan(spec, job=job, gradient_accumulation_steps=4)
    split = tiny.plan(spec, job=job, zero_stage=3, tp=2, dp=dp, gradient_accumulation_steps=4 // dp)
    cases.agree(tmp_path, one, split, **{"model_path": cases.saved(tmp_path, one)} if from_disk else {})


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_model_under_fsdp2_is_never_whole(tmp_path, from_disk):
    """It is built without memory, and each rank keeps its slices of what it reads. Random weights are built by one
    process, with the values of a model that is built whole."""
    plan = tiny.plan(dp=2, zero_stage=3)
    rundir = tiny.run_directory(tmp_path, plan, **{"model_path": cases.saved(tmp_path, plan)} if from_disk else {})
    assert pool("torch", 2).run(devices_at_birth, rundir) == [{"meta"}, {"meta"}]
    plain = dict(random_model(rundir.plan.model, rundir.run.seed).named_parameters())
    (first, read), (second, other) = pool("torch", 2).run(built_and_read, rundir)
    assert (len(first), len(second)) == (len(plain), 0)
    assert [cases.same(each, plain) for each in (read, other)] == [True, True]


def built_and_read(rundir):
    """Names of the tensors that this process has built, and all weights as it reads them."""
    source = RandomWeights(rundir, torch.float32, torch.device("cpu"))
    return list(source._built), {name: source.read(name) for name in source.names()}


def devices_at_birth(rundir):
    """Where parameters were when the model had been built."""
    from kit.engines.torch import engine as module

    found, original = set(), module.build_skeleton

    def watched(*args):
        model = original(*args)
        found.update(parameter.device.type for parameter in model.parameters())
        return model

    with mock.patch.object(module, "build_skeleton", watched):
        engine = TorchEngine(rundir)
        engine.forward_backward(cases.batches(engine, rundir, 0))
    return found


def test_ddp_reduces_once_a_step(tmp_path):
    """Whatever the accumulation: each bucket is all-reduced in the last backward only."""
    usual, accumulated = (
        pool("torch", 2).run(
            count_reductions,
            tiny.run_directory(tmp_path, tiny.plan(dp=2, micro_batch_size=1, gradient_accumulation_steps=each)),
        )
        for each in (1, 3)
    )
    assert usual == accumulated == [usual[0]] * 2 != [0, 0]


def count_reductions(rundir):
    """Buckets that DDP reduces in the second step (it rebuilds its buckets after the first)."""
    engine = TorchEngine(rundir)
    cases.steps(engine, rundir, 0, 1)
    buckets = []

    def hook(_, bucket):
        buckets.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    engine._parallel._ddp.register_comm_hook(None, hook)
    engine.forward_backward(cases.batches(engine, rundir, 1))
    return len(buckets)


@pytest.mark.parametrize(("zero_stage", "freed"), [(2, False), (3, True)])
def test_stage_3_frees_a_layers_parameters_after_its_forward(tmp_path, zero_stage, freed):
    rundir = tiny.run_directory(tmp_path, tiny.plan(dp=2, zero_stage=zero_stage))
    assert pool("torch", 2).run(is_sharded_after_forward, rundir) == [freed, freed]


def is_sharded_after_forward(rundir):
    """Whether the first layer is back to its slices between forward and backward."""
    engine = TorchEngine(rundir)
    batch = cases.batches(engine, rundir, 0)[0]
    logits = engine._parallel.module(training=True)(**call_arguments(batch, torch.device("cpu"))).logits
    sharded = isinstance(engine._model.model.layers[0].mlp.up_proj.weight, DTensor)
    logits.sum().backward()
    return sharded


def test_bf16_under_fsdp2_is_close_to_fp32(tmp_path):
    """Summed over ranks in fp32: sums in bf16 would be numbers of bf16."""
    one, split = tiny.plan(gradient_accumulation_steps=2), tiny.plan(dp=2, zero_stage=3)
    assert [
        name
        for name, found in cases.near_in_bf16(tmp_path, one, split).items()
        if torch.equal(found, found.bfloat16().float())
    ] == []
