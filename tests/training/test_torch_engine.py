"""The torch engine: gradients against plain torch, one process against two, the rules every engine obeys."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor

from kit.engines import build_engine
from kit.engines.base import IGNORE_INDEX, MicroBatch, StateKind
from kit.engines.huggingface.inputs import call_arguments
from kit.engines.huggingface.models import build_model, parameter_shapes
from kit.engines.huggingface.random_weights import RandomWeights
from kit.engines.torch.engine import TorchEngine
from kit.errors import CheckpointError, EngineError
from kit.specs.job import LoraSpec
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.batches import micro_batches, sample


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest magnitude."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.usefixtures("one_process")
class TestOneProcess:
    def test_gradient_is_of_the_mean_over_all_tokens_of_the_step(self, tmp_path):
        rundir = tiny.run_directory(tmp_path, tiny.plan(micro_batch_size=2, gradient_accumulation_steps=3))
        engine = TorchEngine(rundir)
        loss = engine.forward_backward(micro_batches(0, mbs=2, accumulation=3))

        model = build_model(rundir, torch.float32, "cpu")
        rows = [sample(index) for index in range(6)]
        inputs, labels = (torch.stack(column) for column in zip(*rows, strict=True))
        mean = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
        mean.backward()
        assert loss.tokens == (labels != IGNORE_INDEX).sum()
        assert loss.mean == pytest.approx(mean.item(), rel=1e-6)
        gradients = cases.state(engine, StateKind.GRADIENT)
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert relative_error(gradients[name], parameter.grad) < 1e-5, name

    def test_step_is_adamw_with_clipping_and_no_decay_of_vectors(self, tmp_path):
        job = {"grad_clip": 0.05, "learning_rate": 1e-2}
        rundir = tiny.run_directory(tmp_path, tiny.plan(tiny.model("qwen2"), job=job))
        engine = TorchEngine(rundir)
        engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
        before = cases.state(engine, StateKind.MASTER)
        gradients = cases.state(engine, StateKind.GRADIENT)
        norm = engine.apply(1e-2).gradient
        assert norm == pytest.approx(sum(g.double().square().sum() for g in gradients.values()).sqrt().item(), rel=1e-6)
        assert norm > 0.05, "clipping must be active for this test to say anything"
        scale = 0.05 / (norm + 1e-6)
        spec = rundir.plan.job.optimizer
        after, exp_avg = cases.state(engine, StateKind.MASTER), cases.state(engine, StateKind.EXP_AVG)
        for name, weight in before.items():
            gradient = gradients[name] * scale
            # First step of Adam with bias correction: m̂ = g, v̂ = g² (Kingma & Ba 2015, algorithm 1)
            decay = 1 - 1e-2 * (spec.weight_decay if weight.ndim > 1 else 0)
            expected = weight * decay - 1e-2 * gradient / (gradient.abs() + spec.eps)
            torch.testing.assert_close(after[name], expected, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(exp_avg[name], (1 - spec.beta1) * gradient, rtol=1e-5, atol=1e-9)
        assert engine.optimizer_steps == 1

    def test_no_clipping_at_zero(self, tmp_path):
        engine = TorchEngine(tiny.run_directory(tmp_path, tiny.plan(job={"grad_clip": 0.0})))
        engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
        gradient = cases.state(engine, StateKind.GRADIENT)["lm_head.weight"]
        engine.apply(1e-3)
        torch.testing.assert_close(cases.state(engine, StateKind.EXP_AVG)["lm_head.weight"], 0.1 * gradient)

    def test_recompute_gives_the_same_gradients(self, tmp_path):
        found = []
        for recompute in ("none", "full"):
            engine = TorchEngine(tiny.run_directory(tmp_path, tiny.plan(recompute=recompute)))
            engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
            found.append(cases.state(engine, StateKind.GRADIENT))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])

    def test_recompute_runs_each_layer_twice(self, tmp_path):
        calls = {"none": 0, "full": 0}
        for recompute in calls:
            engine = TorchEngine(tiny.run_directory(tmp_path, tiny.plan(recompute=recompute)))

            def count(*_, recompute=recompute):
                calls[recompute] += 1

            engine._model.model.layers[0].input_layernorm.register_forward_hook(count)
            engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
        assert calls == {"none": 1, "full": 2}

    def test_bf16_autocasts_and_keeps_fp32_parameters(self, tmp_path):
        losses = {}
        for precision in ("fp32", "bf16"):
            engine = TorchEngine(tiny.run_directory(tmp_path, tiny.plan(job={"precision": precision})))
            losses[precision] = engine.forward_backward(micro_batches(0, mbs=2, accumulation=1)).mean
            assert cases.state(engine, StateKind.MASTER)["model.norm.weight"].dtype is torch.float32
        assert losses["bf16"] != losses["fp32"]
        assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)

    def test_evaluate_touches_nothing(self, tmp_path):
        rundir = tiny.run_directory(tmp_path)
        engine = TorchEngine(rundir)
        before = cases.state(engine, StateKind.MASTER)
        evaluated = engine.evaluate(micro_batches(0, mbs=2, accumulation=1))
        trained = engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
        assert evaluated == trained
        after = cases.state(engine, StateKind.MASTER)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert engine.optimizer_steps == 0

    def test_evaluation_draws_no_random_number(self, tmp_path):
        """Adapters have dropout: in training alone."""
        build_model(tiny.run_directory(tmp_path), torch.float32, "cpu").save_pretrained(tmp_path / "hf")
        plan = tiny.plan(job={"lora": LoraSpec(rank=4, dropout=0.5)})
        engine = TorchEngine(tiny.run_directory(tmp_path, plan, model_path=str(tmp_path / "hf")))
        batches = micro_batches(0, mbs=2, accumulation=1)
        before = torch.get_rng_state()
        engine.evaluate(batches)
        assert torch.equal(torch.get_rng_state(), before)
        engine.forward_backward(batches)
        assert not torch.equal(torch.get_rng_state(), before)

    def test_discard_clears_gradients_without_a_step(self, tmp_path):
        engine = TorchEngine(tiny.run_directory(tmp_path))
        engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
        with pytest.raises(EngineError, match="gradients of an earlier step"):
            engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
        engine.discard()
        with pytest.raises(EngineError, match="has no gradient"):
            next(engine.export_blocks([StateKind.GRADIENT]))
        assert engine.optimizer_steps == 0

    def test_all_masked_is_an_error(self, tmp_path):
        engine = TorchEngine(tiny.run_directory(tmp_path))
        (batch,) = micro_batches(0, mbs=2, accumulation=1)
        with pytest.raises(EngineError, match="no label of this step counts"):
            engine.forward_backward([MicroBatch(batch.input_ids, torch.full_like(batch.labels, IGNORE_INDEX))])

    def test_held_bytes(self, tmp_path):
        engine = TorchEngine(tiny.run_directory(tmp_path))
        num_parameters = sum(tensor.numel() for tensor in cases.state(engine, StateKind.MASTER).values())
        assert engine.held_bytes() == {"weights": 4 * num_parameters, "gradients": 0, "optimizer": 8 * num_parameters}
        engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
        assert engine.held_bytes()["gradients"] == 4 * num_parameters

    def test_starts_from_a_hugging_face_directory(self, tmp_path):
        donor = build_model(tiny.run_directory(tmp_path, seed=99), torch.float32, "cpu")
        donor.save_pretrained(tmp_path / "hf")
        engine = TorchEngine(tiny.run_directory(tmp_path, model_path=str(tmp_path / "hf")))
        master = cases.state(engine, StateKind.MASTER)
        assert all(torch.equal(master[name], parameter) for name, parameter in donor.named_parameters())

    def test_another_models_directory_is_refused(self, tmp_path):
        other = tiny.run_directory(tmp_path, tiny.plan(tiny.model(ffn_hidden_size=48)))
        build_model(other, torch.float32, "cpu").save_pretrained(tmp_path / "hf")
        with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj\.weight has shape"):
            TorchEngine(tiny.run_directory(tmp_path, model_path=str(tmp_path / "hf")))

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
    def test_plans_it_cannot_run_are_refused(self, tmp_path, layout, message):
        with pytest.raises(EngineError, match=message):
            build_engine(tiny.run_directory(tmp_path, tiny.plan(**layout)))


@pytest.mark.everyday("0-none-llama")
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize(("zero_stage", "recompute"), [(0, "none"), (0, "full"), (2, "none"), (3, "none"), (3, "full")])
def test_two_processes_agree_with_one(tmp_path, family, zero_stage, recompute):
    """Masked labels differ from rank to rank, so a mean of per-rank means would not pass."""
    spec = tiny.model(family)
    job = {"optimizer": dataclasses.replace(tiny.plan().job.optimizer, eps=1e-3)}  # large: early Adam is sign descent
    alone = tiny.plan(spec, job=job, micro_batch_size=2, gradient_accumulation_steps=4)
    layout = {"dp": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    split = tiny.plan(spec, job=job, zero_stage=zero_stage, recompute=recompute, **layout)
    (one,) = pool("torch", 1).run(cases.train_and_export, tiny.run_directory(tmp_path, alone))
    two, other = pool("torch", 2).run(cases.train_and_export, tiny.run_directory(tmp_path, split))
    assert (two["first"], two["curve"], two["evaluated"]) == (other["first"], other["curve"], other["evaluated"])
    assert two["first"].tokens == one["first"].tokens
    assert two["first"].mean == pytest.approx(one["first"].mean, rel=1e-6)
    assert two["gradients"].keys() == one["gradients"].keys()
    for name, gradient in one["gradients"].items():
        assert relative_error(two["gradients"][name], gradient) < 1e-5, name
    assert torch.tensor(two["curve"] + two["after"]).allclose(torch.tensor(one["curve"] + one["after"]), rtol=1e-5)
    assert two["evaluated"].mean == pytest.approx(one["evaluated"].mean, rel=1e-6)
    for name, weight in one["master"].items():
        assert relative_error(two["master"][name], weight) < 1e-5, name


@pytest.mark.everyday("llama-False-1")
@pytest.mark.parametrize(
    ("family", "from_disk", "dp"),
    [("llama", False, 1), ("llama", True, 1), ("qwen2", False, 1), ("qwen2", True, 1), ("llama", True, 2)],
)
def test_tensor_parallelism_agrees_with_one_process(tmp_path, family, from_disk, dp):
    """And its exchange checkpoint goes on without it: names and shapes are those of whole parameters. With dp = 2,
    rows that tensor parallelism splits are split again by FSDP2."""
    spec = tiny.model(family, tied_embeddings=family == "qwen2")
    job = {"optimizer": dataclasses.replace(tiny.plan().job.optimizer, eps=1e-3)}
    alone = tiny.plan(spec, job=job, micro_batch_size=2, gradient_accumulation_steps=4)
    paths = {}
    if from_disk:
        donor = build_model(tiny.run_directory(tmp_path, alone, seed=3), torch.float32, "cpu")
        donor.save_pretrained(tmp_path / "hf")
        paths = {"model_path": str(tmp_path / "hf")}
    split = {"tp": 2, "dp": dp, "gradient_accumulation_steps": 4 // dp}
    cut = dataclasses.replace(alone, layout=dataclasses.replace(alone.layout, zero_stage=3, **split))
    (one,) = pool("torch", 1).run(cases.train_and_export, tiny.run_directory(tmp_path, alone, **paths))
    rundir = tiny.run_directory(tmp_path, cut, **paths)
    two = pool("torch", 2 * dp).run(cases.train_and_export, rundir, tmp_path / "out")[0]
    for name, gradient in one["gradients"].items():
        assert relative_error(two["gradients"][name], gradient) < 1e-5, name
    assert torch.tensor(two["curve"] + two["after"]).allclose(torch.tensor(one["curve"] + one["after"]), rtol=1e-5)
    resumed = pool("torch", 1).run(
        cases.import_and_train, tiny.run_directory(tmp_path, alone, **paths), tmp_path / "out"
    )
    assert torch.tensor(resumed[0]["after"]).allclose(torch.tensor(one["after"]), rtol=1e-5)


def test_a_model_from_a_directory_is_never_whole(tmp_path):
    """Under FSDP2 it is built without memory, and each rank keeps its slices of what it reads."""
    plan = tiny.plan(dp=2, zero_stage=3)
    build_model(tiny.run_directory(tmp_path, plan), torch.float32, "cpu").save_pretrained(tmp_path / "hf")
    rundir = tiny.run_directory(tmp_path, plan, model_path=str(tmp_path / "hf"))
    assert pool("torch", 2).run(devices_at_birth, rundir) == [{"meta"}, {"meta"}]


def test_random_weights_of_fsdp2_are_built_by_one_process(tmp_path):
    """The others have nothing but their slices. The values are those of a model that is built whole."""
    rundir = tiny.run_directory(tmp_path, tiny.plan(dp=2, zero_stage=3))
    assert pool("torch", 2).run(devices_at_birth, rundir) == [{"meta"}, {"meta"}]
    plain = dict(build_model(rundir, torch.float32, "cpu").named_parameters())
    first, second = pool("torch", 2).run(built_and_read, rundir)
    assert (len(first[0]), len(second[0])) == (len(parameter_shapes(rundir.plan.model)), 0)
    for read in (first[1], second[1]):
        assert read.keys() == plain.keys()
        assert all(torch.equal(read[name], plain[name]) for name in plain)


def built_and_read(rundir):
    """Names of the tensors that this process has built, and all weights as it reads them."""
    source = RandomWeights(rundir, torch.float32, torch.device("cpu"))
    return list(source._built), {name: source.read(name) for name in source.names()}


def devices_at_birth(rundir):
    """Where parameters were when the model had been built."""
    from kit.engines.torch import engine as module

    found, original = set(), module.build_model

    def watched(*args):
        model = original(*args)
        found.update(parameter.device.type for parameter in model.parameters())
        return model

    module.build_model = watched
    try:
        engine = TorchEngine(rundir)
        engine.forward_backward(cases.batches(engine, rundir, 0))
    finally:
        module.build_model = original
    return found


def test_ddp_reduces_once_a_step(tmp_path):
    """Whatever the accumulation: each bucket is all-reduced in the last backward only."""
    reductions = []
    for accumulation in (1, 3):
        plan = tiny.plan(dp=2, micro_batch_size=1, gradient_accumulation_steps=accumulation)
        reductions += pool("torch", 2).run(count_reductions, tiny.run_directory(tmp_path, plan))
    assert len(set(reductions)) == 1
    assert reductions[0] >= 1


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


@pytest.mark.parametrize(("zero_stage", "share"), [(0, 1.0), (2, 0.5), (3, 0.5)])
def test_fsdp2_really_shards(tmp_path, zero_stage, share):
    rundir = tiny.run_directory(tmp_path, tiny.plan(dp=2, zero_stage=zero_stage))
    weights = 4 * sum(math.prod(shape) for shape in parameter_shapes(rundir.plan.model).values())
    expected = {"weights": share * weights, "gradients": share * weights, "optimizer": 2 * share * weights}
    assert pool("torch", 2).run(held_after_backward, rundir) == [expected, expected]


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


def held_after_backward(rundir):
    """Bytes that a rank holds while gradients exist."""
    engine = TorchEngine(rundir)
    engine.forward_backward(cases.batches(engine, rundir, 0))
    return engine.held_bytes()


def test_bf16_under_fsdp2_is_close_to_fp32(tmp_path):
    found = {}
    for precision in ("fp32", "bf16"):
        plan = tiny.plan(dp=2, zero_stage=3, job={"precision": precision})
        found[precision] = pool("torch", 2).run(cases.train_and_export, tiny.run_directory(tmp_path, plan))[0]
    assert found["bf16"]["first"].mean != found["fp32"]["first"].mean
    assert found["bf16"]["first"].mean == pytest.approx(found["fp32"]["first"].mean, rel=1e-2)
    for name, gradient in found["fp32"]["gradients"].items():
        cosine = torch.cosine_similarity(found["bf16"]["gradients"][name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.99, name
    # Summed over ranks in fp32: sums in bf16 would be numbers of bf16.
    assert not any(torch.equal(g, g.bfloat16().float()) for g in found["bf16"]["gradients"].values())
