"""fp8 on the torch engine, emulated as on every processor: which layers, how far from bf16, the same on any split."""

from __future__ import annotations

import re

import pytest
import torch

from kit.engines.huggingface.models import build_skeleton
from kit.engines.kernels import fp8
from kit.engines.protocol import StateKind
from kit.errors import EngineError
from kit.rehearsal.rounding import gradient_bound
from kit.specs.job import OptimizerSpec
from tests.support import tiny
from tests.support.refusals import refusal
from tests.training import cases

EPS = OptimizerSpec(eps=1e-3, weight_decay=0.1)
"""Early Adam is sign descent, which makes much of rounding; with such an epsilon it does not."""

CONVERTED = {
    "llama": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
    | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
    # Experts are one tensor a layer, and the router is a module of its own.
    "mixtral": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"},
    "gpt_oss": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"},
    # Widths of 10, 12, 28, 40 and 52 of its compressed states and heads are no multiples of 16.
    "deepseek_v3": {"self_attn.kv_a_proj_with_mqa"}
    | {"mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"},
}


@pytest.mark.parametrize("family", CONVERTED)
def test_linear_layers_of_blocks_are_converted_and_nothing_else(family):
    needed = {"deepseek_v3": {"num_shared_experts": 1}, "gpt_oss": {"sliding_window": 16, "full_attention_every": 2}}
    model = build_skeleton(tiny.model(family, **needed.get(family, {})))
    before = dict(model.named_parameters())
    converted = fp8.convert(model, emulated=True)
    assert {re.sub(r"^.*?\.\d+\.", "", name) for name in converted} == CONVERTED[family]
    assert len(converted) == 2 * len(CONVERTED[family])
    assert {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"} == set(converted)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_a_model_without_linear_layers_is_refused():
    assert "GPT2LMHeadModel, none of whose blocks" in refusal(
        EngineError, fp8.convert, build_skeleton(tiny.model("gpt2")), emulated=True
    )


@pytest.mark.parametrize("tokens", [32, 24])
def test_emulation_is_what_torchs_own_kernel_computes(tokens):
    """torch._scaled_mm has one for processors. Under autocast the input is cast, as on a GPU."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(48, 32, generator=generator), torch.randn(32, 48, generator=generator)]
    inputs = torch.randn(tokens, 32, generator=generator)
    found = []
    for emulated in (False, True):
        block = tiny_block(weights)
        assert len(fp8.convert(block, emulated=emulated, ragged=tokens % 16 > 0)) == 2
        with torch.autocast("cpu", enabled=emulated):
            output = block(inputs if emulated else inputs.bfloat16())
        output.float().square().sum().backward()
        found.append([output, *(parameter.grad for parameter in block.parameters())])
    torch.testing.assert_close(*found, rtol=2.0**-7, atol=1e-3)


def tiny_block(weights: list[torch.Tensor]) -> torch.nn.Module:
    """Linear layers in a block."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Block(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(*w.shape[::-1], bias=False) for w in weights))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layers(inputs)

    block = Block().bfloat16()
    for parameter, weight in zip(block.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    return torch.nn.Sequential(block)


def plan(precision="fp8", **layout):
    return tiny.plan(job={"precision": precision, "optimizer": EPS}, **{"gradient_accumulation_steps": 2, **layout})


def test_gradients_are_as_far_from_fp32_as_rounding_to_eight_bits_takes_them(tmp_path):
    whole, sixteen, eight = (cases.alone(tmp_path / each, plan(each)) for each in ("fp32", "bf16", "fp8"))
    in_bf16, in_fp8 = (cases.relative(found["gradients"], whole["gradients"]) for found in (sixteen, eight))
    assert in_bf16 < gradient_bound(2) < in_fp8 < gradient_bound(2, "fp8") < 0.3
    for (loss, norm), (expected, expected_norm) in zip(eight["first"], whole["first"], strict=True):
        assert loss == pytest.approx(expected, rel=gradient_bound(2))
        assert norm == pytest.approx(expected_norm, rel=gradient_bound(2, "fp8"))
    masters = eight[StateKind.MASTER]
    assert {name: tensor.dtype for name, tensor in masters.items()} == dict.fromkeys(whole["gradients"], torch.float32)


@pytest.mark.everyday("3")
@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.nightly
def test_two_processes_compute_what_one_does(zero_stage, tmp_path):
    """Scales are of a micro batch, so equal micro batches give equal numbers; FSDP2 rounds weights to bf16 first. With
    blocks that are compiled."""
    one = plan(zero_stage=zero_stage)
    split = plan(zero_stage=zero_stage, dp=2, gradient_accumulation_steps=1, compile_layers=True)
    found = cases.agree(tmp_path, one, split, bound=1e-3)[0]
    assert cases.relative(found["gradients"], cases.alone(tmp_path, one)["gradients"]) < 1e-6
