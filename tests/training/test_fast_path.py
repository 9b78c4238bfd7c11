"""The fast path computes what the slow one does: chunked loss, compiled blocks, and a step that seldom waits."""

from __future__ import annotations

import re

import pytest
import torch
import torch._dynamo.utils
from torch.nn import functional
from torch.nn.attention import SDPBackend
from transformers.modeling_layers import GradientCheckpointingLayer

from kit.addons.probe.tracker import LiveBytes
from kit.cost.memory.activations_huggingface import loss_bytes
from kit.engines.huggingface.models import random_model
from kit.engines.kernels import chunked_loss, compiled_blocks
from kit.engines.kernels.chunked_loss import linear_cross_entropy
from kit.engines.kernels.compiled_blocks import choose_attention
from kit.engines.kernels.loss import mean_scale, summed_cross_entropy
from kit.engines.kernels.tiled_mlp import tile_mlps
from kit.engines.protocol import IGNORE_INDEX, StateKind
from kit.engines.torch import optimizer
from kit.engines.torch.engine import TorchEngine
from kit.errors import EngineError
from kit.specs.job import OptimizerSpec
from tests.support import tiny
from tests.support.host_syncs import waits_in_a_step
from tests.support.refusals import refusal
from tests.training import cases
from tests.training.batches import micro_batches
from tests.training.test_torch_engine import CAPPED, engine_of

TOKENS, HIDDEN, VOCABULARY = 50, 16, 97
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
    loss = function(*arguments, cap=cap, **more) * 0.3
    loss.backward()
    return [loss.detach(), *(t.grad for t in arguments if t.grad is not None)]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(
    ("chunk_tokens", "compiled"), [(1, False), (7, False), (TOKENS, False), (1000, False), (24, True)]
)
def test_chunks_add_up_to_the_whole(monkeypatch, cap, chunk_tokens, compiled):
    """Compiled: the function that compile_layers hands to chunked_loss, traced; the remainder of 50 tokens is a length
    more."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")
    slopes = {"slopes": chunked_loss.compiled_gradients_of_logits()} if compiled else {}
    expected = with_gradients(plain, *operands(), cap=cap)
    found = with_gradients(linear_cross_entropy, *operands(), cap=cap, chunk_tokens=chunk_tokens, **slopes)
    assert len(found) == 4
    assert max(map(relative_error, found, expected)) < 1e-6


def test_in_16_bits_it_is_no_further_from_the_truth():
    exact = with_gradients(plain, *operands())
    rounded = with_gradients(plain, *operands(torch.bfloat16))
    found = with_gradients(linear_cross_entropy, *operands(torch.bfloat16), chunk_tokens=7)
    for value, usual, truth in zip(found, rounded, exact, strict=True):
        assert value.dtype == usual.dtype
        assert relative_error(value, truth) < 1.1 * relative_error(usual, truth)


def test_autocast_rounds_what_it_would_round():
    autocast = torch.autocast("cpu", torch.bfloat16)  # which decorates functions
    expected = with_gradients(autocast(plain), *operands())
    found = with_gradients(autocast(linear_cross_entropy), *operands(), chunk_tokens=TOKENS)
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


def test_a_head_without_labels_has_the_logits_that_it_had():
    """As generation asks for them, capped."""
    model, ids = random_model(tiny.model("gemma2", **CAPPED), seed=0), torch.arange(12).reshape(2, 6)
    expected = model(ids).logits
    with chunked_loss.ChunkedLoss(model, chunk_tokens=5).of(ids):
        assert model(ids).logits.item() == pytest.approx(summed_cross_entropy(expected, ids).item(), rel=1e-6)
    torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.parametrize(("tokens", "scale"), [(0, 4.0), (1, 4.0), (2, 2.0), (3, 4 / 3)])
def test_gradients_are_of_a_mean_over_the_tokens_of_all_ranks(tokens, scale):
    assert mean_scale(torch.tensor(tokens), 4).item() == pytest.approx(scale)


def test_gradients_are_given_away_once():
    loss = linear_cross_entropy(*operands(), chunk_tokens=7)
    loss.backward(retain_graph=True)
    assert "second backward" in refusal(RuntimeError, loss.backward)


def test_peak_of_head_and_loss_is_the_cost_models():
    """A vocabulary large beside the width, several chunks: without any parameters' own bytes."""
    width, vocabulary, sequences = 8, 8192, 4 * chunked_loss.LOSS_CHUNK_TOKENS // tiny.SEQ_LENGTH
    spec = tiny.model(vocab_size=vocabulary, hidden_size=width, head_dim=2)
    expected, whole = (
        loss_bytes(tiny.plan(spec, micro_batch_size=sequences, chunked_loss=chunked).workload)
        for chunked in (True, False)
    )
    hidden = torch.randn(sequences * tiny.SEQ_LENGTH, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(0, vocabulary, (len(hidden),))
    with LiveBytes() as live:
        live.leave_out([hidden, weight, labels])
        linear_cross_entropy(hidden, weight, None, labels).backward()
    assert live.peak == pytest.approx(expected, rel=0.05)
    assert whole > 8 * expected


# ---------------------------------------------------------------- in the engine


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("recompute", "most_graphs"), [("none", 2), ("full", 3)])
def test_all_blocks_run_one_compiled_block(tmp_path, monkeypatch, recompute, most_graphs):
    """Traced once for training, evaluation and recompute, whatever layers and steps. ``aot_eager`` traces forward and
    backward as inductor does, and runs them without a C++ compiler."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")
    found, batches = [], micro_batches(5, mbs=2, accumulation=2)
    for compile_layers in (False, True):
        engine = engine_of(
            tmp_path / str(compile_layers), tiny.model(num_layers=3),
            gradient_accumulation_steps=2, recompute=recompute, compile_layers=compile_layers,
        )  # fmt: skip
        losses = engine.evaluate(batches).mean, engine.forward_backward(batches).mean
        found.append((losses, cases.state(engine, StateKind.GRADIENT)))
    for step in range(1, 4):
        engine.apply(1e-3)
        engine.forward_backward(micro_batches(step, mbs=2, accumulation=2))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert cases.worst(found[1][1], found[0][1]) < 1e-6
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= most_graphs, f"{graphs} graphs for 3 layers and 4 steps"
    assert not torch._dynamo.utils.counters["graph_break"]


def test_attention_kernels_are_chosen_in_torch(monkeypatch):
    """cuDNN's goes before the others, which stay; a FlashAttention that is not installed is named."""
    before, asked = torch._C._get_sdp_priority_order(), []
    try:
        choose_attention("default")
        assert torch._C._get_sdp_priority_order() == before
        choose_attention("cudnn")
        order = [SDPBackend(each).name for each in torch._C._get_sdp_priority_order()]
        assert order[:2] == ["CUDNN_ATTENTION", "FLASH_ATTENTION"]
        assert {"EFFICIENT_ATTENTION", "MATH"} <= {*order}
    finally:
        torch._C._set_sdp_priority_order(before)
    assert re.search(
        r"flash_attn_interface.* install FlashAttention 3", refusal(EngineError, choose_attention, "flash3")
    )
    monkeypatch.setattr(compiled_blocks, "activate_flash_attention_impl", asked.append)
    choose_attention("flash4")
    assert (asked, torch._C._get_sdp_priority_order()) == (["FA4"], before)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (compiled_blocks.compile_layers, "compile_layers=true with Linear, which has no blocks that repeat"),
        (tile_mlps, "tiled_mlp=true with MlpLess, whose MlpLess has no module mlp"),
        (chunked_loss.ChunkedLoss, "chunked_loss=true with MlpLess, whose head is NoneType and no linear layer"),
    ],
)
def test_models_without_the_layers_are_named(change, says):
    class MlpLess(GradientCheckpointingLayer):
        def get_output_embeddings(self):
            return None

    assert says in refusal(EngineError, change, torch.nn.Linear(1, 1) if "Linear," in says else MlpLess())


# ---------------------------------------------------------------- who waits for the device


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("chunked", [False, True])
def test_a_step_waits_once(tmp_path, chunked):
    """For loss, token count and norm together; not once a micro batch."""
    engine = engine_of(tmp_path, gradient_accumulation_steps=3, chunked_loss=chunked)
    waits, hidden = waits_in_a_step(engine, micro_batches(1, mbs=2, accumulation=3))
    assert waits == {"loss.py:to_host": 1}
    assert not hidden  # tolist of several is a copy


@pytest.mark.usefixtures("one_process")
def test_fused_adamw_steps_the_same(tmp_path, monkeypatch):
    """torch has its fused kernel for CPUs too; both weight decays, clipping, five steps, and moments read and set."""
    found, names = [], ("fused", "one by one")
    for name in names:
        monkeypatch.setattr(optimizer, "_fuses", lambda parameters, name=name: name == "fused")
        rundir = tiny.run_directory(tmp_path / name, tiny.plan(job={"grad_clip": 0.5, "optimizer": EPS}))
        engine = TorchEngine(rundir)
        assert bool(engine._optimizer._optimizers[0].param_groups[0]["fused"]) == (name == "fused")
        engine.set_optimizer_steps(3)
        cases.steps(engine, rundir, 0, 5)
        assert engine.optimizer_steps == 8
        found.append({kind: cases.state(engine, kind) for kind in (StateKind.MASTER, StateKind.EXP_AVG_SQ)})
    for kind, tensors in found[1].items():
        errors = {name: relative_error(found[0][kind][name], tensor) for name, tensor in tensors.items()}
        assert max(errors.values()) < 1e-6, errors
