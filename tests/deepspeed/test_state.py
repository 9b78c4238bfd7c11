"""State in and out: exchange checkpoints, DeepSpeed's own files, discarding, evaluating, and what is refused."""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch
import torch.distributed as dist

from kit.emit.deepspeed import ds_config
from kit.engines.base import MicroBatch, StateKind
from kit.errors import CheckpointError, EngineError
from tests.deepspeed import cases, plain
from tests.support import tiny
from tests.support.workers import pool

SHORT = {"optimizer_state_dtype": "bf16"}
HOST = {"offload_optimizer": "cpu", "offload_param": "cpu"}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cases.hf_directory(tmp_path_factory.mktemp("start"))


def run(case, *arguments, world_size=cases.WORLD_SIZE):
    return pool("deepspeed", world_size).run(case, *arguments)


CHANGES = {
    "0 → 0": (cases.plan(0), cases.plan(0)),
    "1 → 2": (cases.plan(1), cases.plan(2)),
    "2 → 3": (cases.plan(2), cases.plan(3)),
    "3 → 2": (cases.plan(3), cases.plan(2)),
    "3 → 3": (cases.plan(3), cases.plan(3)),
    "3 → 0": (cases.plan(3), cases.plan(0)),
    "3 → 3 on the host": (cases.plan(3), cases.plan(3, **HOST)),
    "2 on the host → 1": (cases.plan(2, offload_optimizer="cpu"), cases.plan(1)),
}


@pytest.mark.everyday("0 \\u2192 0")
@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_training_goes_on_through_the_exchange_checkpoint(before, after, start, tmp_path):
    whole, resumed = run(cases.through_the_exchange_checkpoint, before, after, start, tmp_path)[0]
    assert plain.curve_error(resumed.losses, whole.losses) < 1e-6
    assert plain.curve_error(resumed.norms, whole.norms) < 1e-6
    for name, master in whole.masters.items():
        assert torch.allclose(resumed.masters[name], master, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("stage", [2, 3])
def test_elements_that_ranks_do_not_divide_come_in_bit_for_bit(stage, tmp_path):
    """Norms of 31 elements and matrices of 31 times 63: the last of two ranks has padding behind its part."""
    spec = tiny.model(hidden_size=31, ffn_hidden_size=63, num_attention_heads=1, num_key_value_heads=1)
    chosen = cases.plan(stage, spec=spec)
    run(cases.leave, chosen, cases.hf_directory(tmp_path, spec=spec), tmp_path, 1)
    _, different = run(cases.go_on, chosen, tmp_path / "exchange", tmp_path, 0)[0]
    assert different == []


@pytest.mark.everyday("0-2")
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 2), (1, 1), (1, 2), (2, 2), (3, 2)])
def test_bf16_keeps_its_fp32_masters_through_the_exchange_checkpoint(stage, accumulation, start, tmp_path):
    """Exactly: a master that was rounded to bf16 on the way would be off by 0.4 %."""
    layout = {"micro_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    chosen = cases.plan(stage, precision="bf16", **layout)
    whole, resumed = run(cases.through_the_exchange_checkpoint, chosen, chosen, start, tmp_path)[0]
    assert resumed.losses == whole.losses
    assert all(torch.equal(resumed.masters[name], master) for name, master in whole.masters.items())


@pytest.mark.everyday("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_state_goes_through_the_exchange_checkpoint_bit_for_bit(stage, start, tmp_path):
    """Masters and moments are bf16 numbers, as fp32 state is not."""
    chosen = cases.plan(stage, precision="bf16", **SHORT)
    whole, resumed = run(cases.through_the_exchange_checkpoint, chosen, chosen, start, tmp_path / "short")[0]
    assert resumed.losses == whole.losses
    assert all(torch.equal(resumed.masters[name], master) for name, master in whole.masters.items())
    other = cases.plan(stage, precision="bf16")
    fp32, _ = run(cases.through_the_exchange_checkpoint, other, chosen, start, tmp_path)[0]
    assert all(torch.equal(master, master.bfloat16().float()) for master in whole.masters.values())
    assert not all(torch.equal(master, master.bfloat16().float()) for master in fp32.masters.values())


NATIVE = {
    "stage 0": cases.plan(0),
    "stage 1": cases.plan(1),
    "stage 2": cases.plan(2),
    "stage 3": cases.plan(3),
    "stage 3 on the host": cases.plan(3, **HOST),
    "bf16, stage 0": cases.plan(0, precision="bf16"),
    "bf16, stage 1": cases.plan(1, precision="bf16"),
    "bf16, stage 2": cases.plan(2, precision="bf16"),
    "bf16, stage 3": cases.plan(3, precision="bf16"),
    "bf16 state, stage 1": cases.plan(1, precision="bf16", **SHORT, micro_batch_size=4, gradient_accumulation_steps=1),
    "bf16 state, stage 2": cases.plan(2, precision="bf16", **SHORT),
    "bf16 state, stage 3": cases.plan(3, precision="bf16", **SHORT),
    "fp16, stage 1": cases.plan(1, precision="fp16"),
    "fp16, stage 2": cases.plan(2, precision="fp16"),
    "fp16, stage 3": cases.plan(3, precision="fp16"),
}


@pytest.mark.everyday("stage 0")
@pytest.mark.parametrize("chosen", NATIVE.values(), ids=NATIVE.keys())
def test_native_save_and_load_are_exact(chosen, start, tmp_path):
    losses, again, different = run(cases.natively, chosen, start, tmp_path)[0]
    assert again == losses
    assert different == []


def test_an_empty_directory_is_no_checkpoint(start, tmp_path):
    assert "no DeepSpeed checkpoint" in run(load_nothing, cases.plan(2), start, tmp_path)[0]


def load_nothing(chosen, start, directory):
    engine = cases.build(chosen, start, directory)
    with pytest.raises(CheckpointError) as error:
        engine.load(directory / "nowhere")
    engine.close()
    return str(error.value)


def test_a_copy_of_the_state_shares_nothing_and_mixes_nothing_up():
    """Views of one buffer begin at one address; a tied tensor is copied once."""
    assert run(copied_views) == [([0, 1, 2, 3, 4, 5], [0, 1, 2], [[0, 1, 2], [3, 4, 5]], True)] * 2


def copied_views():
    from kit.engines.deepspeed.memory_checkpoint import _on_host

    flat = torch.arange(6)
    copied = _on_host({"flat": flat, "part": flat[:3], "matrix": flat.view(2, 3), "tied": flat}, {})
    flat.zero_()
    return *(copied[name].tolist() for name in ("flat", "part", "matrix")), copied["tied"] is copied["flat"]


class Canary:
    """Makes a directory where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("older", [False, True], ids=["zip", "torch's older format"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_foreign_pickle_is_refused_on_every_rank_and_never_run(stage, older, start, tmp_path):
    """In a file that one rank alone reads, in stages 1 to 3."""
    words = run(load_a_canary, cases.plan(stage), start, tmp_path, older)
    assert words[0] == words[1]
    assert "names posix.mkdir, which is not in the closed list of classes" in words[0]
    assert not (tmp_path / "sang").exists()


def load_a_canary(chosen, start, directory, older):
    engine = cases.build(chosen, start, directory)
    native = directory / "native"
    if dist.get_rank() == 0:
        native.mkdir()
    dist.barrier()
    engine.save(native)
    dist.barrier()
    if dist.get_rank() == 0:
        last = sorted(native.rglob("*.pt"))[-1]
        state = torch.load(last, weights_only=False)
        torch.save(state | {"canary": Canary(directory / "sang")}, last, _use_new_zipfile_serialization=not older)
    dist.barrier()
    with pytest.raises(CheckpointError) as error:
        engine.load(native)
    engine.close()
    return str(error.value)


LAYOUTS = {
    "stage 0": cases.plan(0),
    "stage 1": cases.plan(1),
    "stage 2": cases.plan(2),
    "stage 3": cases.plan(3),
    "stage 1, host": cases.plan(1, offload_optimizer="cpu"),
    "stage 2, host": cases.plan(2, offload_optimizer="cpu"),
    "stage 3, host": cases.plan(3, **HOST),
    "bf16, stage 0": cases.plan(0, precision="bf16"),
    "bf16, stage 1": cases.plan(1, precision="bf16"),
    "bf16, stage 2": cases.plan(2, precision="bf16"),
    "bf16, stage 3": cases.plan(3, precision="bf16"),
    "bf16, stage 2, host": cases.plan(2, precision="bf16", offload_optimizer="cpu"),
}


@pytest.mark.everyday("stage 0")
@pytest.mark.parametrize("chosen", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_discard_and_evaluate_leave_no_trace(chosen, start, tmp_path):
    plain, disturbed = run(cases.disturb, chosen, start, tmp_path)[0]
    assert disturbed == plain


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_evaluation_is_the_training_loss(stage, start, tmp_path):
    evaluated, trained = run(evaluate_and_train, cases.plan(stage), start, tmp_path)[0]
    assert evaluated == trained


def evaluate_and_train(chosen, start, directory):
    engine = cases.build(chosen, start, directory)
    batches = cases.micro_batches(engine, chosen, 0)
    both = engine.evaluate(batches), engine.forward_backward(batches)
    engine.close()
    return both


@pytest.mark.parametrize("stage", [0, 3])
def test_one_process_needs_no_launcher(stage, start, tmp_path, monkeypatch):
    """Gradients of 4 micro batches on one process are those of plain torch."""
    chosen = cases.plan(stage, dp=1, gradient_accumulation_steps=4)
    curve = run(cases.train, chosen, start, tmp_path, 3, world_size=1)[0]
    expected = plain.reference(start, 3)
    assert plain.gradient_error(curve, expected) < 1e-5
    assert plain.curve_error(curve.norms, expected.norms) < 1e-5


def test_random_weights_are_those_of_the_seed(tmp_path):
    """transformers makes equal weights, bit for bit. Weights partitioned at construction have the same spread, and a
    second run repeats them."""
    from kit.engines.huggingface.models import build_model

    model = build_model(tiny.run_directory(tmp_path, cases.plan(0)), torch.float32, "cpu")
    whole, partitioned, again = (run(random_weights, cases.plan(stage), tmp_path)[0] for stage in (0, 3, 3))
    rounded = run(random_weights, cases.plan(0, precision="bf16"), tmp_path)[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(whole[name], parameter)
        assert torch.equal(rounded[name], parameter.bfloat16().float()), "no step was made of them"
        assert torch.equal(again[name], partitioned[name])
        assert partitioned[name].shape == parameter.shape
        assert partitioned[name].std().item() == pytest.approx(parameter.std().item(), rel=0.1)


def random_weights(chosen, directory):
    engine = cases.build(chosen, None, directory)
    masters = cases.exported(engine, StateKind.MASTER)
    engine.close()
    return masters


def test_ranks_share_what_their_stage_shares(start, tmp_path):
    """Bytes per parameter of the ZeRO paper's figure 1, fp32, 2 ranks, right after a backward."""
    held = {stage: run(measure, cases.plan(stage), start, tmp_path)[0] for stage in (0, 1, 2, 3)}
    parameters = held[0]["weights"] / 4
    per_parameter = {stage: {k: round(v / parameters, 1) for k, v in each.items()} for stage, each in held.items()}
    assert per_parameter[0] == {"weights": 4, "gradients": 4, "optimizer": 8}
    assert per_parameter[1]["weights"] == per_parameter[2]["weights"] == 4
    # Half of the masters (a copy of the weights, in fp32 too) and of both moments.
    assert per_parameter[1]["optimizer"] == per_parameter[2]["optimizer"] == per_parameter[3]["optimizer"] == 6
    assert per_parameter[2]["gradients"] < per_parameter[0]["gradients"]
    assert per_parameter[3]["weights"] == per_parameter[3]["gradients"] == 2


def measure(chosen, start, directory):
    engine = cases.build(chosen, start, directory)
    cases.advance(engine, chosen, 0, 1)
    engine.forward_backward(cases.micro_batches(engine, chosen, 1))
    held = engine.held_bytes()
    engine.discard()
    engine.close()
    return held


@pytest.mark.parametrize("chosen", [cases.plan(0), cases.plan(2), cases.plan(3), cases.plan(0, precision="bf16")])
def test_a_gradient_that_is_not_finite_stops_the_run(chosen, start, tmp_path):
    message, unchanged = run(overflow, chosen, start, tmp_path)[0]
    assert "gradient norm" in message
    assert unchanged


def overflow(chosen, start, directory):
    """DeepSpeed would skip the step and say nothing."""
    engine = cases.build(chosen, start, directory)
    before = cases.exported(engine, StateKind.MASTER)
    backward = engine._engine.backward
    engine._engine.backward = lambda loss, **keywords: backward(loss * math.inf, **keywords)
    engine.forward_backward(cases.micro_batches(engine, chosen, 0))
    with pytest.raises(EngineError) as error:
        engine.apply(1e-3)
    after = cases.exported(engine, StateKind.MASTER)
    engine.close()
    return str(error.value), all(torch.equal(after[name], master) for name, master in before.items())


def test_steps_without_labels_or_on_top_of_others_are_refused(start, tmp_path):
    messages = run(misuse, cases.plan(2), start, tmp_path)[0]
    assert "no label of this step counts" in messages[0]
    assert "call apply or discard" in messages[1]


def misuse(chosen, start, directory):
    engine = cases.build(chosen, start, directory)
    batches = cases.micro_batches(engine, chosen, 0)
    empty = [MicroBatch(b.input_ids, torch.full_like(b.labels, -100)) for b in batches]
    with pytest.raises(EngineError) as first:
        engine.forward_backward(empty)
    engine.forward_backward(batches)
    with pytest.raises(EngineError) as second:
        engine.forward_backward(batches)
    engine.discard()
    engine.close()
    return [str(first.value), str(second.value)]


EDITS = {
    "another stage": ({"zero_optimization": {"stage": 1}}, "zero_stage=1 was started where the plan has 2"),
    "round robin": ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "round_robin_gradients"),
    "ZenFlow": (
        {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
        "every weight is in the wrong place",
    ),
    "SuperOffload": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        "where no exchange checkpoint finds them",
    ),
    "DeepCompile": ({"compile": {"deepcompile": True}}, "does not call engine.compile"),
    "own accumulation": ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
    "a scheduler": ({"scheduler": {"type": "WarmupLR", "params": {}}}, "run.schedule"),
    "bf16": ({"bf16": {"enabled": True}}, "precision=bf16 was started where the plan has fp32"),
}


@pytest.mark.parametrize(("edit", "message"), EDITS.values(), ids=EDITS.keys())
def test_settings_that_would_be_wrong_in_silence_are_refused(edit, message, start, tmp_path):
    chosen = cases.plan(2)
    settings = copy.deepcopy(ds_config(chosen)) | edit
    assert message in run(refused, chosen, start, tmp_path, settings)[0]


def refused(chosen, start, directory, settings):
    with pytest.raises(EngineError) as error:
        cases.build(chosen, start, directory, settings)
    return str(error.value)
