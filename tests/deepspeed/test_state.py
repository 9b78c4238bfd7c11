"""State in and out: checkpoints, discarding, evaluating, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from kit.emit.deepspeed import ds_config
from kit.engines.deepspeed.grad_norm import unscaled_norm
from kit.engines.huggingface.models import random_model
from kit.engines.protocol import MicroBatch, StateKind
from kit.errors import EngineError
from tests.deepspeed import cases, plain
from tests.deepspeed.cases import run
from tests.deepspeed.test_optimizers import plan as with_optimizer
from tests.deepspeed.test_parity import AUTOTP, FOUR, HOST, MEGATRON, TWICE, ULYSSES, UNEVEN
from tests.support import tiny
from tests.support.refusals import refusal

SHORT = {"optimizer_state_dtype": "bf16"}
EXPERTS = tiny.model("deepseek_v3", num_shared_experts=1)
"""Whose routers have corrections, which are buffers."""
FUSED = tiny.model("gpt_oss", sliding_window=16, full_attention_every=2)
"""Whose experts are fused and interleaved on disk."""
AT_ONCE = {"micro_batch_size": 4, "gradient_accumulation_steps": 1}


def uneven(stage, **layout):
    return cases.plan(stage, spec=UNEVEN, **layout)


def bf16(stage, **layout):
    return cases.plan(stage, precision="bf16", **layout)


CHANGES = {
    "0 to 0": (uneven(0), uneven(0)),
    "1 to 2": (uneven(1), uneven(2)),
    "2 to 3": (uneven(2), uneven(3)),
    "3 to 2": (uneven(3), uneven(2)),
    "3 to 0": (uneven(3), uneven(0)),
    "3 to 3 on the host": (uneven(3), uneven(3, **HOST)),
    "2 on the host to 1": (uneven(2, offload_optimizer="cpu"), uneven(1)),
    "Ulysses, 3 to AutoTP, 0": (cases.plan(3, **ULYSSES), cases.plan(0, **AUTOTP)),
    "experts, 3 to 2": (cases.plan(3, spec=EXPERTS), cases.plan(2, spec=EXPERTS)),
    "fused experts, 3 to 2": (cases.plan(3, spec=FUSED), cases.plan(2, spec=FUSED)),
    "fused experts, 0 to 3": (cases.plan(0, spec=FUSED), cases.plan(3, spec=FUSED)),
    "Megatron, 2 to Megatron, 3, sp": (cases.plan(2, **MEGATRON), cases.plan(3, sp=True, **MEGATRON)),
    "3 on four to 3": (uneven(3, **FOUR), uneven(3)),
    "2 to 2 on four": (uneven(2), uneven(2, **FOUR)),
    "0 to hpZ on four": (cases.plan(0), cases.plan(3, zero_hpz=2, **FOUR)),
    "Ulysses on four, 3 to AutoTP, 1": (cases.plan(3, **ULYSSES | TWICE), cases.plan(1, **AUTOTP)),
    "AutoTP on four, 3 to 1": (cases.plan(3, **AUTOTP | TWICE), cases.plan(1)),
    "Megatron on four, 3, sp to 3": (cases.plan(3, sp=True, **MEGATRON | TWICE), cases.plan(3)),
    "2 on four to Megatron on four, 2, host": (
        cases.plan(2, **FOUR),
        cases.plan(2, sp=True, offload_optimizer="cpu", **MEGATRON | TWICE),
    ),
    "Megatron on four, 0 to 2": (cases.plan(0, **MEGATRON | TWICE), cases.plan(2)),
    "Megatron on four, 1 to Megatron, 3": (cases.plan(1, **MEGATRON | TWICE), cases.plan(3, sp=True, **MEGATRON)),
    **{f"bf16, {stage}": (bf16(stage),) * 2 for stage in (0, 1, 2, 3)},
    "bf16, 1, one micro batch": (bf16(1, **AT_ONCE),) * 2,
    "bf16 state, 2": (bf16(2, **SHORT),) * 2,
    "bf16 state, 3": (bf16(3, **SHORT),) * 2,
}


@pytest.mark.everyday(
    "1 to 2",
    "2 on the host to 1",
    "Ulysses, 3 to AutoTP, 0",
    "AutoTP on four, 3 to 1",
    "fused experts, 3 to 2",
    "Megatron on four, 1 to Megatron, 3",
    "bf16, 0",
    "bf16 state, 3",
)
@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_training_goes_on_on_another_layout(before, after, references, tmp_path):
    """In bf16 exactly: a master that was rounded to bf16 on the way would be off by 0.4 %. Masters in bf16 are bf16
    numbers, as those in fp32 are not."""
    start, _ = references(before.model)
    whole = run(cases.leave, before, start, tmp_path, 2, None, 2)
    resumed, different = run(cases.go_on, after, tmp_path / "step", tmp_path, 2)
    assert different == []
    assert plain.worst(resumed, whole) < (1e-6 if before.job.precision == "fp32" else 1e-12)
    rounded = all(torch.equal(master, master.bfloat16().float()) for master in whole.masters.values())
    assert rounded == (before.layout.optimizer_state_dtype == "bf16")


def test_a_forgotten_moment_shows(start, tmp_path):
    whole = run(cases.leave, cases.plan(2), start, tmp_path, 2, None, 2)
    resumed, _ = run(cases.go_on, cases.plan(3), tmp_path / "step", tmp_path, 2, "resume-forgets-moments")
    assert plain.worst(resumed, whole) > 1e-3


EXACT = {
    **{f"stage {stage}": uneven(stage) for stage in (0, 1, 2, 3)},
    "stage 3 on the host": uneven(3, **HOST),
    "Megatron, stage 3, sp": cases.plan(3, sp=True, **MEGATRON),
    **{f"bf16, stage {stage}": bf16(stage) for stage in (0, 1, 2, 3)},
    "bf16 state, stage 1": bf16(1, **SHORT, **AT_ONCE),
    "bf16 state, stage 2": bf16(2, **SHORT),
    "bf16 state, stage 3": bf16(3, **SHORT),
    **{f"fp16, stage {stage}": cases.plan(stage, precision="fp16") for stage in (1, 2, 3)},
}


@pytest.mark.everyday("stage 3 on the host", "bf16, stage 0", "fp16, stage 2")
@pytest.mark.parametrize("chosen", EXACT.values(), ids=EXACT.keys())
def test_a_checkpoint_of_the_same_layout_is_exact(chosen, references, tmp_path):
    found = run(cases.resumed, chosen, references(chosen.model)[0], tmp_path)
    assert (found["same bits"], found["again"], found["steps"]) == (True, found["after"], 5)


LAYOUTS = {
    **{f"stage {stage}": uneven(stage) for stage in (0, 1, 2, 3)},
    "stage 1, host": uneven(1, offload_optimizer="cpu"),
    "stage 2, host": uneven(2, offload_optimizer="cpu"),
    "stage 3, host": uneven(3, **HOST),
    **{f"bf16, stage {stage}": bf16(stage) for stage in (0, 1, 2, 3)},
    "bf16, stage 2, host": bf16(2, offload_optimizer="cpu"),
    "Megatron, stage 2, sp": cases.plan(2, sp=True, **MEGATRON),
    "SGD, stage 1": with_optimizer("sgd", 1, spec=UNEVEN),
}


@pytest.mark.everyday("stage 2, host", "stage 3, host", "bf16, stage 0", "bf16, stage 1", "SGD, stage 1")
@pytest.mark.parametrize("chosen", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_discard_and_evaluate_leave_no_trace(chosen, references, tmp_path):
    plain, disturbed = run(cases.disturb, chosen, references(chosen.model)[0], tmp_path)
    assert disturbed == plain


def test_random_weights_are_those_of_the_seed(tmp_path):
    """transformers makes equal weights, bit for bit, which no step was made of. Weights partitioned at construction
    have the same spread, and a second run repeats them."""
    model = random_model(cases.plan(0).model, seed=7)
    plans = (cases.plan(0), bf16(0), cases.plan(3), cases.plan(3))
    whole, rounded, partitioned, again = (run(cases.initial, each, None, tmp_path) for each in plans)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole[name], parameter)
        assert torch.equal(rounded[name], parameter.bfloat16().float())
        assert torch.equal(again[name], partitioned[name])
        assert partitioned[name].shape == parameter.shape
        assert partitioned[name].std().item() == pytest.approx(parameter.std().item(), rel=0.1)


def test_ranks_share_what_their_stage_shares(start, tmp_path):
    """Bytes per parameter of the ZeRO paper's figure 1, fp32, 2 ranks, right after a backward. Of gradients stage 1
    keeps its own half beside all of the last micro batch's."""
    held = {stage: run(cases.inside, cases.plan(stage), start, tmp_path, measure) for stage in (0, 2, 3)}
    parameters = held[0]["weights"] / 4
    assert {stage: {k: round(v / parameters, 1) for k, v in each.items()} for stage, each in held.items()} == {
        0: {"weights": 4, "gradients": 4, "optimizer": 8},
        # Half of the masters (a copy of the weights, in fp32 too) and of both moments.
        2: {"weights": 4, "gradients": 2, "optimizer": 6},
        3: {"weights": 2, "gradients": 2, "optimizer": 6},
    }


def measure(engine, chosen):
    cases.advance(engine, chosen, 0, 1)
    engine.forward_backward(cases.micro_batches(engine, chosen, 1))
    held = engine.memory_bytes()
    engine.discard()
    return held


@pytest.mark.everyday("0", "2", "3")
@pytest.mark.parametrize("chosen", [cases.plan(0), cases.plan(2), cases.plan(3), bf16(0)], ids=["0", "2", "3", "bf16"])
def test_a_gradient_that_is_not_finite_stops_the_run(chosen, start, tmp_path):
    message, unchanged = run(cases.inside, chosen, start, tmp_path, overflow)
    assert "gradient norm" in message
    assert unchanged


def overflow(engine, chosen):
    """DeepSpeed would skip the step and say nothing."""
    before = cases.exported(engine, StateKind.MASTER)
    backward = engine._engine.backward
    engine._engine.backward = lambda loss, **keywords: backward(loss * math.inf, **keywords)
    engine.forward_backward(cases.micro_batches(engine, chosen, 0))
    said, after = refusal(EngineError, engine.apply, 1e-3), cases.exported(engine, StateKind.MASTER)
    return said, all(torch.equal(after[name], master) for name, master in before.items())


@pytest.mark.parametrize(
    ("norm", "unscaled"), [(3.0, 1.5), (torch.tensor(8.0), 4.0), (0.0, 0.0), (-1.0, math.inf), (math.nan, math.inf)]
)
def test_a_norm_of_deepspeeds_is_divided_by_the_loss_scale_and_minus_one_means_overflow(norm, unscaled):
    assert unscaled_norm(norm, 2.0) == unscaled


def test_steps_without_labels_or_on_top_of_others_are_refused(start, tmp_path):
    messages = run(cases.inside, cases.plan(2), start, tmp_path, misuse)
    assert "no label of this step counts" in messages[0]
    assert "call apply or discard" in messages[1]
    assert "gradients can be exported, not imported" in messages[2]


def misuse(engine, chosen):
    """What three misuses say. The step after the first has the gradients of its own samples."""
    batches = cases.micro_batches(engine, chosen, 0)
    empty = [MicroBatch(b.input_ids, torch.full_like(b.labels, -100)) for b in batches]
    said = [refusal(EngineError, engine.forward_backward, empty)]
    engine.forward_backward(batches)
    said.append(refusal(EngineError, engine.forward_backward, batches))
    said.append(refusal(EngineError, engine.import_state, StateKind.GRADIENT, None))
    engine.discard()
    return said


EDITS = {
    "another stage": ({"zero_optimization": {"stage": 1}}, "zero_stage=1 was started where the plan has 2"),
    "round robin": ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "round_robin_gradients"),
    "ZenFlow": (
        {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
        "every weight is in the wrong place",
    ),
    "SuperOffload": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        "where no checkpoint finds them",
    ),
    "DeepCompile": ({"compile": {"deepcompile": True}}, "does not call engine.compile"),
    "own accumulation": ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
    "a universal checkpoint": ({"checkpoint": {"load_universal": True}}, "resume from a checkpoint of kit"),
    "a scheduler": ({"scheduler": {"type": "WarmupLR", "params": {}}}, "run.schedule"),
    "bf16": ({"bf16": {"enabled": True}}, "precision=bf16 was started where the plan has fp32"),
}


@pytest.mark.parametrize(("edit", "message"), EDITS.values(), ids=EDITS.keys())
def test_settings_that_would_be_wrong_in_silence_are_refused(edit, message, start, tmp_path):
    assert message in run(refused, cases.plan(2), start, tmp_path, edit)


def refused(chosen, start, directory, edit):
    return refusal(EngineError, cases.build, chosen, start, directory, ds_config(chosen) | edit)
