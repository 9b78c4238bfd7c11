"""The fast path computes what the slow one does: chunked loss, compiled blocks, and a step that seldom waits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch.nn import functional

import kit
from kit.cost.memory.activations_huggingface import loss_bytes
from kit.cost.workload import Workload
from kit.diagnose.probe.tracker import LiveBytes
from kit.engines.base import IGNORE_INDEX, StateKind
from kit.engines.kernels import chunked_loss, compiled_blocks
from kit.engines.kernels.chunked_loss import linear_cross_entropy
from kit.engines.kernels.loss import summed_cross_entropy
from kit.engines.torch import optimizer
from kit.engines.torch.engine import TorchEngine
from kit.errors import EngineError
from kit.planner.rules import violations
from kit.specs.job import OptimizerSpec
from tests.support import tiny
from tests.support.host_syncs import Waits, waits_in_a_step
from tests.support.workers import pool
from tests.training import cases
from tests.training.batches import micro_batches

TOKENS, HIDDEN, VOCABULARY = 50, 16, 97
CHUNK = 24
"""Divides neither the tokens above nor those of a micro batch (64)."""


EPS = OptimizerSpec(eps=1e-3, weight_decay=0.1)
"""Early Adam is sign descent, which makes much of rounding; with such an epsilon it does not."""


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head input, weight, bias, labels of which some do not count."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    )
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::7] = IGNORE_INDEX
    return hidden, weight, bias, labels


def plain(hidden, weight, bias, labels, cap=None):
    """The loss with all logits at once."""
    logits = functional.linear(hidden, weight, bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return summed_cross_entropy(logits[None], labels[None])


def with_gradients(function, *arguments, cap=None, **more) -> list[torch.Tensor]:
    """Loss times 0.3, and what it gives every operand that wants a gradient."""
    for tensor in arguments:
        if tensor is not None:
            tensor.grad = None
    loss = function(*arguments, cap=cap, **more) * 0.3
    loss.backward()
    return [loss.detach(), *(t.grad.clone() for t in arguments if t is not None and t.grad is not None)]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("chunk_tokens", [1, 7, TOKENS, 1000])
def test_chunks_add_up_to_the_whole(cap, chunk_tokens):
    expected = with_gradients(plain, *operands(), cap=cap)
    found = with_gradients(linear_cross_entropy, *operands(), cap=cap, chunk_tokens=chunk_tokens)
    assert len(found) == 4
    assert max(map(relative_error, found, expected)) < 1e-6


def test_a_wrong_derivative_of_the_cap_shows(monkeypatch):
    right = chunked_loss._capped
    monkeypatch.setattr(chunked_loss, "_capped", lambda logits, cap: (right(logits, cap)[0], None))
    expected = with_gradients(plain, *operands(), cap=2.0)
    found = with_gradients(linear_cross_entropy, *operands(), cap=2.0, chunk_tokens=7)
    assert relative_error(found[0], expected[0]) < 1e-6  # the loss alone would not tell
    assert relative_error(found[2], expected[2]) > 1e-1


def test_in_16_bits_it_is_no_further_from_the_truth():
    exact = with_gradients(plain, *operands())
    rounded = with_gradients(plain, *operands(torch.bfloat16))
    found = with_gradients(linear_cross_entropy, *operands(torch.bfloat16), chunk_tokens=7)
    for value, usual, truth in zip(found, rounded, exact, strict=True):
        assert value.dtype == usual.dtype
        assert relative_error(value, truth) < 1.1 * relative_error(usual, truth)


def test_autocast_rounds_what_it_would_round():
    def under_autocast(function, **more):
        def call(*arguments, **rest):
            with torch.autocast("cpu", torch.bfloat16):
                return function(*arguments, **rest, **more)

        return with_gradients(call, *operands())

    expected = under_autocast(plain)
    found = under_autocast(linear_cross_entropy, chunk_tokens=TOKENS)
    assert relative_error(found[0], expected[0]) < 1e-6
    assert all(gradient.dtype == torch.float32 for gradient in found)
    # The weight's gradient is not rounded to bf16 on its way to fp32, that of the usual way is.
    assert max(map(relative_error, found[1:], expected[1:])) < 2**-8


def test_a_frozen_head_and_an_evaluation_make_no_gradients():
    hidden, weight, _, labels = operands()
    linear_cross_entropy(hidden, weight.detach(), None, labels, chunk_tokens=7).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, None, labels, chunk_tokens=7)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, plain(hidden, weight, None, labels).detach())


def test_gradients_are_given_away_once():
    loss = linear_cross_entropy(*operands(), chunk_tokens=7)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_peak_of_head_and_loss_is_the_cost_models():
    """A vocabulary large beside the width, several chunks: without any parameters' own bytes."""
    width, vocabulary, sequences = 8, 8192, 4 * chunked_loss.LOSS_CHUNK_TOKENS // tiny.SEQ_LENGTH
    spec = tiny.model(vocab_size=vocabulary, hidden_size=width, head_dim=2)
    chosen = tiny.plan(spec, micro_batch_size=sequences, chunked_loss=True)
    expected = loss_bytes(Workload(spec, chosen.cluster, chosen.job, chosen.layout))
    whole = dataclasses.replace(chosen.layout, chunked_loss=False)
    without = loss_bytes(Workload(spec, chosen.cluster, chosen.job, whole))

    hidden = torch.randn(sequences * tiny.SEQ_LENGTH, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(0, vocabulary, (len(hidden),))
    with LiveBytes() as live:
        live.leave_out([hidden, weight, labels])
        linear_cross_entropy(hidden, weight, None, labels).backward()
    assert live.peak == pytest.approx(expected, rel=0.05)
    assert without > 8 * expected


# ---------------------------------------------------------------- in the engine


def gradients_of(engine: TorchEngine, chunk_tokens: int | None = None) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Mean losses of a step and of an evaluation, and the step's gradients."""
    if engine._chunked is not None and chunk_tokens is not None:
        engine._chunked._chunk_tokens = chunk_tokens
    evaluated = engine.evaluate(micro_batches(5, mbs=2, accumulation=2)).mean
    loss = engine.forward_backward(micro_batches(0, mbs=2, accumulation=2)).mean
    return loss, evaluated, cases.state(engine, StateKind.GRADIENT)


def assert_same(found: Any, expected: Any, bound: float = 1e-6) -> None:
    assert found[:2] == pytest.approx(expected[:2], rel=bound)
    assert found[2].keys() == expected[2].keys()
    errors = {name: relative_error(found[2][name], gradient) for name, gradient in expected[2].items()}
    assert max(errors.values()) < bound, max(errors, key=lambda name: errors[name])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_engine_with_chunked_loss(tmp_path, family):
    """An untied head, a tied one, and capped logits."""
    capped = {"logit_softcap": 3.0, "attention_softcap": 50.0, "sliding_window": 16}
    capped |= {"tied_embeddings": True, "query_pre_attn_scalar": 8}
    spec = tiny.model(family, **(capped if family == "gemma2" else {}))
    found = []
    for chunked in (False, True):
        chosen = tiny.plan(spec, gradient_accumulation_steps=2, chunked_loss=chunked)
        engine = TorchEngine(tiny.run_directory(tmp_path / str(chunked), chosen))
        assert (engine._chunked is not None) == chunked
        found.append(gradients_of(engine, CHUNK))
    assert_same(found[1], found[0])


def traced(rundir: tiny.TinyRunDirectory) -> tuple[dict[str, torch.Tensor], int, int]:
    """In a worker: gradients of the second step on the main rank, graphs, and breaks of them."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_blocks, "BACKEND", "aot_eager")
        engine = TorchEngine(rundir)
        for step in range(2):
            engine.forward_backward(cases.batches(engine, rundir, step))
            gradients = cases.state(engine, StateKind.GRADIENT)
            engine.apply(1e-3)
    engine.close()
    counters = torch._dynamo.utils.counters
    return gradients, counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.parametrize(("stage", "recompute"), [(0, "none"), (3, "full")])
def test_compiled_blocks_where_hooks_are_around_them(tmp_path, stage, recompute):
    """DDP, FSDP2: what gathers weights and reduces gradients stays outside of what is traced."""
    found = []
    for compile_layers in (False, True):
        words = {"dp": 2, "zero_stage": stage, "recompute": recompute, "gradient_accumulation_steps": 2}
        chosen = tiny.plan(**words, compile_layers=compile_layers)
        found.append(pool("torch", 2).run(traced, tiny.run_directory(tmp_path / str(compile_layers), chosen))[0])
    (expected, *none), (gradients, graphs, breaks) = found
    assert none == [0, 0]
    assert expected.keys() == gradients.keys()
    assert max(relative_error(gradients[name], gradient) for name, gradient in expected.items()) < 1e-6
    assert 1 <= graphs <= 3 and breaks == 0  # noqa: PT018


def chunked_gradients(rundir: tiny.TinyRunDirectory) -> dict[str, torch.Tensor]:
    """In a worker: gradients of the first step on the main rank."""
    engine = TorchEngine(rundir)
    if engine._chunked is not None:
        engine._chunked._chunk_tokens = CHUNK
    engine.forward_backward(cases.batches(engine, rundir, 0))
    gradients = cases.state(engine, StateKind.GRADIENT)
    engine.close()
    return gradients


@pytest.mark.parametrize("stage", [0, 3])
def test_chunked_loss_where_gradients_and_weights_are_elsewhere(tmp_path, stage):
    """DDP, which sees only a scalar leave the model, and FSDP2, which gathers the head's weight around it."""
    found = []
    for chunked in (False, True):
        chosen = tiny.plan(dp=2, zero_stage=stage, gradient_accumulation_steps=2, chunked_loss=chunked)
        found.append(pool("torch", 2).run(chunked_gradients, tiny.run_directory(tmp_path / str(chunked), chosen))[0])
    assert found[0].keys() == found[1].keys()
    assert max(relative_error(found[1][name], gradient) for name, gradient in found[0].items()) < 1e-6


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("recompute", "most_graphs"), [("none", 2), ("full", 3)])
def test_all_blocks_run_one_compiled_block(tmp_path, monkeypatch, recompute, most_graphs):
    """Traced once for training, evaluation and recompute, whatever layers and steps. ``aot_eager`` traces forward and
    backward as inductor does, and runs them without a C++ compiler."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")
    spec, found = tiny.model(num_layers=3), []
    for compile_layers in (False, True):
        chosen = tiny.plan(spec, gradient_accumulation_steps=2, recompute=recompute, compile_layers=compile_layers)
        engine = TorchEngine(tiny.run_directory(tmp_path / str(compile_layers), chosen))
        found.append(gradients_of(engine))
    for step in range(1, 4):
        engine.apply(1e-3)
        engine.forward_backward(micro_batches(step, mbs=2, accumulation=2))
    assert_same(found[1], found[0])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= most_graphs, f"{graphs} graphs for 3 layers and 4 steps"
    assert not torch._dynamo.utils.counters["graph_break"]


def test_what_was_not_tried_is_refused():
    def refused(spec=None, job=None, **layout) -> str:
        chosen = tiny.plan(spec, job=job, **layout)
        return " ".join(str(found) for found in violations(chosen.workload))

    assert "chunked_loss" not in refused(chunked_loss=True)
    assert "compile_layers" not in refused(compile_layers=True)
    megatron = {"engine": "megatron", "implementation": "local"}
    assert "chunked_loss=true" in refused(chunked_loss=True, **megatron)
    assert "chunked_loss=true" in refused(chunked_loss=True, dp=1, tp=2, zero_stage=3)
    assert "chunked_loss=true" in refused(tiny.model("bart"), {"objective": "seq2seq"}, chunked_loss=True)
    assert "compile_layers=true" in refused(compile_layers=True, engine="deepspeed", zero_stage=3)
    assert "compile_layers=true" in refused(compile_layers=True, **megatron)
    assert "compile_layers" not in refused(compile_layers=True, engine="deepspeed", zero_stage=2)
    assert "needs a GPU and 16 bits" in refused(attention_kernel="cudnn")


def test_a_flash_attention_that_is_not_installed_is_named():
    with pytest.raises(EngineError, match=r"flash_attn_interface.* install FlashAttention 3"):
        compiled_blocks.choose_attention("flash3")


def test_the_planner_knows_what_both_do():
    """2.2 of 5.9 GiB of logits stay, of which 1.5 are the head's gradient. There are fewer kernels and passes over
    memory."""

    job = kit.JobSpec(seq_length=4096, global_batch_size=8)

    def predicted(chunked: bool, compiled: bool, **more):
        pins = {"engine": "torch", "micro_batch_size": 1, "recompute": "none"} | more
        chosen = kit.Pins(**pins, chunked_loss=chunked, compile_layers=compiled)
        return kit.plan("llama-3.2-1b", "1xH200", job, chosen).predicted

    usual, chunked, compiled_only, both = (
        predicted(*which) for which in ((False, False), (True, False), (False, True), (True, True))
    )
    assert chunked.peak_gib < usual.peak_gib - 2.5
    # Operators one by one pass more often over a chunk in fp32 than over whole logits; in one kernel they do not.
    assert usual.step_time_s < chunked.step_time_s < 1.06 * usual.step_time_s
    assert 0.5 * usual.step_time_s < both.step_time_s < compiled_only.step_time_s < 0.95 * usual.step_time_s
    cudnn, flash3 = (predicted(True, True, attention_kernel=kernel).step_time_s for kernel in ("cudnn", "flash3"))
    assert flash3 < cudnn < both.step_time_s

    layout = kit.plan("llama-3.2-1b", "1xH200", job).layout  # nothing pinned
    assert layout.chunked_loss and layout.compile_layers  # noqa: PT018
    small = kit.JobSpec(seq_length=tiny.SEQ_LENGTH, global_batch_size=2, precision="fp32")
    layout = kit.plan(tiny.model(), "1xcpu", small).layout
    assert not layout.chunked_loss and not layout.compile_layers  # noqa: PT018


def test_compiled_slopes_are_the_same(monkeypatch):
    """The function that compile_layers hands to chunked_loss, traced; the remainder of 50 tokens is a length more."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")
    for cap in (None, 2.0):
        expected = with_gradients(plain, *operands(), cap=cap)
        slopes = chunked_loss.compiled_gradients_of_logits()
        found = with_gradients(linear_cross_entropy, *operands(), cap=cap, chunk_tokens=24, slopes=slopes)
        assert max(map(relative_error, found, expected)) < 1e-6


# ---------------------------------------------------------------- who waits for the device


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("chunked", [False, True])
def test_a_step_waits_once(tmp_path, chunked):
    """For loss, token count and norm together; not once a micro batch."""
    chosen = tiny.plan(gradient_accumulation_steps=3, chunked_loss=chunked)
    engine = TorchEngine(tiny.run_directory(tmp_path, chosen))
    waits, hidden = waits_in_a_step(engine, micro_batches(1, mbs=2, accumulation=3))
    assert waits == {"loss.py:to_host": 1}
    assert not hidden  # tolist of several is a copy


def test_a_wait_belongs_to_a_module_whatever_the_folders_are_called():
    """``git clone`` makes a folder named kit, with everything below it: the libraries too."""
    waits = Waits()
    for module, file in {
        "kit.loss": "/src/checkout/loss.py",
        "torch.frame": "/src/kit/.venv/torch/frame.py",
        "script": "/src/kit/script.py",
        "torch.optim.adam": "/src/kit/deepspeed/adam.py",
        "kitchen.sink": "/src/kit/sink.py",
    }.items():
        names = {"__name__": module}
        exec(compile("def ask(one):\n    return one.item()", file, "exec"), names)
        with waits:
            names["ask"](torch.ones(()))
    assert waits.places == {"loss.py:ask": 1}


@pytest.mark.usefixtures("one_process")
def test_fused_adamw_steps_the_same(tmp_path, monkeypatch):
    """torch has its fused kernel for CPUs too; both weight decays, clipping, five steps, and moments read and set."""
    found, names = [], ("fused", "one by one")
    for name in names:
        monkeypatch.setattr(optimizer, "_fuses", lambda parameters, name=name: name == "fused")
        engine = TorchEngine(tiny.run_directory(tmp_path / name, tiny.plan(job={"grad_clip": 0.5, "optimizer": EPS})))
        assert bool(engine._optimizer._optimizers[0].param_groups[0]["fused"]) == (name == "fused")
        engine.set_optimizer_steps(3)
        for step in range(5):
            engine.forward_backward(micro_batches(step, mbs=2, accumulation=1))
            engine.apply(1e-2)
        assert engine.optimizer_steps == 8
        found.append({kind: cases.state(engine, kind) for kind in (StateKind.MASTER, StateKind.EXP_AVG_SQ)})
    for kind, tensors in found[1].items():
        errors = {name: relative_error(found[0][kind][name], tensor) for name, tensor in tensors.items()}
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.usefixtures("one_process")
def test_a_wait_in_every_micro_batch_would_show(tmp_path, monkeypatch):
    engine = TorchEngine(tiny.run_directory(tmp_path, tiny.plan(gradient_accumulation_steps=3)))
    forward = engine._loss
    monkeypatch.setattr(engine, "_loss", lambda *args, **more: (loss := forward(*args, **more)) * (loss.item() > 0))
    waits, _ = waits_in_a_step(engine, micro_batches(1, mbs=2, accumulation=3))
    assert sum(waits.values()) == 4


@pytest.mark.usefixtures("one_process")
def test_a_step_without_labels_is_refused_and_leaves_nothing(tmp_path):
    engine = TorchEngine(tiny.run_directory(tmp_path))
    masked = [
        dataclasses.replace(one, labels=one.labels * 0 + IGNORE_INDEX)
        for one in micro_batches(0, mbs=2, accumulation=1)
    ]
    with pytest.raises(EngineError, match="no label of this step counts"):
        engine.forward_backward(masked)
    engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
