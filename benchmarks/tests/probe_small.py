"""Probe small plans in a process of its own, for Megatron patches torch: ``python -m benchmarks.tests.probe_small
"small-llama, …, stage 0"…``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from benchmarks.accuracy.probe.plans import Case, probed
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


def shape(family: str, **changes: object) -> ModelSpec:
    """Four layers, wide enough that what is counted outweighs indices and scores."""
    sizes = {
        "name": f"small-{family}",
        "family": family,
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 2048,
        "max_position_embeddings": 1024,
    }
    return ModelSpec(**{**sizes, **changes})  # type: ignore[arg-type]


LLAMA, QWEN3 = shape("llama"), shape("qwen3")
GPT2 = shape("gpt2", num_key_value_heads=8, rope_theta=None, ffn_hidden_size=1024)
BLENDERBOT = shape(
    "blenderbot", num_key_value_heads=8, rope_theta=None, ffn_hidden_size=1024, encoder_layers=2, tied_embeddings=True
)
WIDE_ATTENTION = shape("llama", head_dim=64, ffn_hidden_size=256)
"""The ring's buffers are more than the gradients of the MLP."""
EXPERTS = shape("qwen3_moe", num_experts=8, experts_per_token=2, moe_ffn_hidden_size=256)


def case(
    model: ModelSpec,
    engine: str,
    stages: tuple[int, ...] = (0,),
    lora: LoraSpec | None = None,
    precision: str = "bf16",
    seq_length: int = 512,
    **layout: object,
) -> Case:
    what = {"model": model, "engine": engine, "seq_length": seq_length, "lora": lora, "precision": precision}
    return Case(stages=stages, layout={"micro_batch_size": 2, **layout}, **what)  # type: ignore[arg-type]


LONG: dict[str, Any] = {
    "zero_stage": 3,
    "dp": 1,
    "cp": 4,
    "micro_batch_size": 1,
    "recompute": "full",
    "chunked_loss": True,
    "seq_length": 16384,
}
CASES = (
    case(QWEN3, "torch", cp_comm_type="p2p", **LONG),
    case(QWEN3, "torch", cp_comm_type="a2a", **LONG),
    case(WIDE_ATTENTION, "torch", cp_comm_type="p2p", **LONG),
    case(QWEN3, "torch", cp_comm_type="p2p", tiled_mlp=True, **LONG),
    case(LLAMA, "torch", zero_stage=0, chunked_loss=True, tiled_mlp=True, seq_length=4096),
    case(LLAMA, "deepspeed", zero_stage=2, dp=4, chunked_loss=True, tiled_mlp=True, recompute="full", seq_length=4096),
    case(LLAMA, "torch", zero_stage=0),
    case(QWEN3, "torch", zero_stage=3, dp=4, recompute="full"),
    case(LLAMA, "torch", zero_stage=3, tp=2, dp=4),
    case(GPT2, "deepspeed", zero_stage=2, dp=4),
    case(LLAMA, "torch", zero_stage=0, lora=LoraSpec(rank=8)),
    case(LLAMA, "torch", zero_stage=3, dp=4, lora=LoraSpec(rank=8)),
    case(LLAMA, "torch", zero_stage=3, dp=4, chunked_loss=True),
    case(LLAMA, "torch", zero_stage=0, chunked_loss=True, precision="fp8"),
    case(LLAMA, "torch", zero_stage=3, dp=4, precision="fp8"),
    case(BLENDERBOT, "deepspeed", zero_stage=2, dp=4),
    case(BLENDERBOT, "torch", zero_stage=0, recompute="full"),
    case(QWEN3, "deepspeed", zero_stage=2, dp=4, lora=LoraSpec(rank=8, targets="attention")),
    case(LLAMA, "megatron", stages=(0, 1), zero_stage=1, tp=2, sp=True, pp=2, dp=2, gradient_accumulation_steps=4),
    case(QWEN3, "megatron", zero_stage=0, tp=4, dp=1),
    case(GPT2, "megatron", zero_stage=1, dp=4, recompute="full"),
    case(LLAMA, "megatron", zero_stage=1, tp=2, sp=True, dp=2, lora=LoraSpec(rank=8)),
    case(EXPERTS, "megatron", zero_stage=1, ep=4, dp=8, lora=LoraSpec(rank=8, targets="attention")),
    case(EXPERTS, "megatron", zero_stage=1, ep=4, dp=8),
    case(EXPERTS, "megatron", zero_stage=1, ep=4, dp=8, recompute="full"),
    case(LLAMA, "torch", zero_stage=3, dp=4, recompute="selective"),
    case(LLAMA, "megatron", zero_stage=1, pp=2, vp=2, dp=2, gradient_accumulation_steps=8),
)


def main() -> None:
    """Print a JSON list: name, and the errors of every stage that is asked for."""
    asked = [
        replace(each, stages=tuple(stage for stage in each.stages if f"{each.name}, stage {stage}" in sys.argv))
        for each in CASES
    ]
    found = ({**each, "name": f"{each['name']}, stage {each['stage']}"} for each in probed(asked))
    json.dump([*found], sys.stdout)


if __name__ == "__main__":
    main()
