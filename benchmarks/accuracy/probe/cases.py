"""Full-size plans over families, splits and modes. No GPU holds all of them: a probe does not mind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.accuracy.probe.plans import Case
from kit.specs.job import LoraSpec


def _on(engine: str, **usual: Any) -> Callable[..., Case]:
    """``usual``: of the layout, unless a case has its own."""

    def case(model: str, seq_length: int = 4096, precision: str = "bf16", **own: Any) -> Case:
        of_case = {name: own.pop(name) for name in ("stages", "lora") if name in own}
        layout = {**usual, **own}
        return Case(model=model, engine=engine, seq_length=seq_length, precision=precision, layout=layout, **of_case)

    return case


_torch, _deepspeed = _on("torch", zero_stage=3, dp=8), _on("deepspeed", zero_stage=3, dp=8)
_megatron = _on("megatron", zero_stage=1, gradient_accumulation_steps=16)
_million = _on("torch", zero_stage=3, dp=1, cp=8, recompute="full", chunked_loss=True)


def _lora(model: str, engine: str, targets: Any = "all-linear", dropout: float = 0.0, **layout: Any) -> Case:
    lora = LoraSpec(targets=targets, dropout=dropout)
    return _on(engine, zero_stage=0, dp=8)(model, seq_length=2048, lora=lora, **layout)


CASES: tuple[Case, ...] = (
    # torch: DDP under autocast, FSDP2
    _torch("llama-3.2-1b", zero_stage=0),
    _torch("llama-3.2-1b", zero_stage=0, recompute="full"),
    _torch("llama-3.2-1b", zero_stage=0, precision="fp32"),
    _torch("qwen2.5-1.5b", zero_stage=0),
    _torch("qwen3-1.7b", zero_stage=0, micro_batch_size=2),
    _torch("llama-3-8b", zero_stage=2),
    _torch("llama-3-8b", zero_stage=3),
    _torch("llama-3-8b", zero_stage=3, recompute="full"),
    _torch("llama-3-8b", zero_stage=3, tp=2, dp=4),
    _torch("qwen2.5-7b", zero_stage=2, tp=2, dp=4),
    _torch("qwen3-8b", zero_stage=3),
    _torch("mistral-7b-v0.1", zero_stage=3, seq_length=8192),
    _torch("gpt2-xl", zero_stage=3, seq_length=1024, micro_batch_size=4),
    _torch("llama-3-70b", zero_stage=3, dp=64, recompute="full"),
    _torch("pythia-2.8b", zero_stage=3, seq_length=2048),
    # torch: a sequence over all ranks
    _million("qwen3-8b", 1_048_576, cp_comm_type="p2p"),
    _million("qwen3-8b", 1_048_576, cp_comm_type="a2a"),
    _million("qwen3-8b", 1_048_576, cp_comm_type="p2p", tiled_mlp=True),
    # DeepSpeed: layers in 16 bits
    _deepspeed("llama-3-8b"),
    _deepspeed("llama-3-8b", recompute="full", micro_batch_size=4),
    _deepspeed("llama-3-70b", dp=64),
    _deepspeed("qwen2.5-7b", zero_stage=2),
    _deepspeed("qwen3-8b"),
    _deepspeed("mistral-7b-v0.1", seq_length=8192),
    _deepspeed("phi-3-mini-4k"),
    _deepspeed("mixtral-8x7b", dp=64),
    _deepspeed("qwen3-30b-a3b", dp=64),
    _deepspeed("gpt2-xl", seq_length=1024, micro_batch_size=8),
    _deepspeed("gemma-2b"),
    _deepspeed("gemma-2-2b"),
    _deepspeed("gemma-3-1b"),
    _deepspeed("gemma-3-1b", seq_length=1024),
    _deepspeed("pythia-2.8b", seq_length=2048),
    _deepspeed("opt-6.7b", seq_length=2048),
    _deepspeed("bloom-1b7", seq_length=2048),
    _deepspeed("falcon-7b", seq_length=2048),
    _deepspeed("starcoder2-3b"),
    _deepspeed("olmo-2-7b"),
    _deepspeed("deepseek-v2-lite", dp=64),
    _deepspeed("gpt-oss-20b", dp=64),
    # Two stacks: the decoder also attends to the encoder
    _deepspeed("blenderbot-3b", seq_length=128, zero_stage=2, micro_batch_size=16),
    _deepspeed("blenderbot-400m-distill", seq_length=128, zero_stage=2, micro_batch_size=16, recompute="full"),
    _torch("blenderbot-400m-distill", zero_stage=0, seq_length=128, micro_batch_size=16),
    _deepspeed("bart-large", seq_length=1024, zero_stage=2, micro_batch_size=4),
    _deepspeed("t5-base", seq_length=512, zero_stage=2, micro_batch_size=4),
    _torch("flan-t5-xl", zero_stage=3, seq_length=512, micro_batch_size=4),
    # Head and loss in chunks
    _torch("llama-3-8b", zero_stage=3, chunked_loss=True),
    _torch("llama-3.2-1b", zero_stage=0, chunked_loss=True),
    # LoRA: weights frozen in 16 bits, adapters in fp32 (torch) or 16 bits (DeepSpeed)
    _lora("llama-3.2-1b", "torch"),
    _lora("llama-3.2-1b", "torch", recompute="full"),
    _lora("llama-3-8b", "torch", "attention"),
    _lora("qwen3-8b", "torch"),
    _lora("llama-3-8b", "torch", zero_stage=3),
    _lora("llama-3-8b", "torch", zero_stage=3, dropout=0.05),
    _lora("llama-3.2-1b", "torch", dropout=0.05),
    _lora("llama-3-8b", "deepspeed", zero_stage=2),
    _lora("gemma-2-2b", "deepspeed", zero_stage=2),
    # Megatron: one rank of every stage that differs
    _megatron("llama-3-8b", dp=8),
    _megatron("llama-3-8b", seq_length=2048, precision="fp32", dp=8),
    _megatron("llama-3-8b", tp=2, sp=True, dp=4),
    _megatron("llama-3-8b", tp=4, dp=2),
    _megatron("llama-3-8b", tp=2, sp=True, dp=4, micro_batch_size=4, recompute="full"),
    _megatron("llama-3-8b", tp=2, sp=True, dp=4, recompute="selective"),
    _megatron("llama-3-8b", seq_length=16384, tp=2, sp=True, cp=2, dp=2),
    _megatron("llama-3-8b", seq_length=16384, tp=2, sp=True, cp=2, dp=2, cp_comm_type="p2p"),
    _megatron("llama-3-8b", stages=(0, 1), pp=2, dp=4),
    _megatron("llama-3-8b", stages=(0, 1), tp=2, sp=True, pp=2, vp=4, dp=2),
    _megatron("llama-3-70b", stages=(0, 1, 3), tp=8, sp=True, pp=4, dp=2),
    _megatron("llama-3-70b", stages=(0, 3), tp=8, sp=True, pp=4, vp=5, dp=2, recompute="full"),
    _megatron(
        "llama-3.1-405b", stages=(0, 1, 15), tp=8, sp=True, pp=16, dp=2, first_stage_layers=7, last_stage_layers=7
    ),
    _megatron("qwen2.5-7b", tp=4, sp=True, dp=2),
    _megatron("qwen3-8b", tp=4, sp=True, dp=2),
    _megatron("mistral-7b-v0.3", tp=2, sp=True, dp=4),
    _megatron("gpt2-xl", seq_length=1024, micro_batch_size=4, dp=8),
    _megatron("gpt2-large", stages=(0, 1), seq_length=1024, micro_batch_size=4, tp=2, sp=True, pp=2, dp=2),
    _megatron("mixtral-8x7b", ep=8, dp=8),
    _megatron("mixtral-8x7b", tp=2, sp=True, ep=4, dp=8),
    _megatron("mixtral-8x7b", stages=(0, 1), tp=2, sp=True, pp=2, ep=4, dp=4, recompute="full"),
    _megatron("mixtral-8x7b", stages=(0, 1), tp=2, sp=True, pp=2, vp=4, ep=4, dp=4, recompute="full"),
    _megatron("qwen3-30b-a3b", stages=(0, 1), tp=4, sp=True, pp=2, ep=8, dp=8),
)
