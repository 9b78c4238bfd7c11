"""Layouts whose gradients and curves must equal plain torch's, and the layout in which each planted fault shows."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = ("run.steps=10", "job.global_batch_size=8", "job.optimizer.eps=1e-4", "run.checkpoint.every_steps=1000")
"""Ten steps. Early Adam is sign descent: a large epsilon keeps rounding from being amplified to a full step."""
GRADIENT_BOUND = 1e-5
"""Largest ‖g − g_ref‖ / ‖g_ref‖ of any parameter at step 1; fp32 reductions in another order give some 1e-7."""
CURVE_BOUND = 1e-5
"""Largest relative difference of loss and gradient norm at any step."""


@dataclass(frozen=True)
class Case:
    """Changes to the tiny recipe that select a layout."""

    name: str
    words: tuple[str, ...]


def _case(name: str, engine: str, processes: int, *pins: str) -> Case:
    layout = [f"layout.{pin}" for pin in pins]
    return Case(name, (f"cluster={processes}xcpu", f"layout.engine={engine}", *layout))


REFERENCE = _case("torch-1", "torch", 1, "micro_batch_size=4")
CASES = (
    _case("torch-ddp2", "torch", 2, "micro_batch_size=2"),
    _case("deepspeed-zero0", "deepspeed", 2, "zero_stage=0", "micro_batch_size=4"),
    _case("deepspeed-zero1", "deepspeed", 2, "zero_stage=1", "micro_batch_size=4"),
    _case("deepspeed-zero2-accumulation", "deepspeed", 2, "zero_stage=2", "micro_batch_size=2"),
    _case("deepspeed-zero3", "deepspeed", 2, "zero_stage=3", "micro_batch_size=4"),
    _case("deepspeed-zero3-recompute", "deepspeed", 2, "zero_stage=3", "micro_batch_size=4", "recompute=full"),
    _case("megatron-tp2", "megatron", 2, "tp=2", "sp=false", "micro_batch_size=4"),
    _case("megatron-tp2-sp", "megatron", 2, "tp=2", "sp=true", "micro_batch_size=4"),
    _case("megatron-pp2", "megatron", 2, "pp=2", "vp=1", "micro_batch_size=2"),
    _case("megatron-pp2-interleaved", "megatron", 2, "pp=2", "vp=2", "micro_batch_size=2"),
    _case("megatron-cp2", "megatron", 2, "tp=1", "pp=1", "cp=2", "micro_batch_size=4"),
    _case("megatron-dp2-distributed-optimizer", "megatron", 2, "tp=1", "pp=1", "zero_stage=1", "micro_batch_size=2"),
)
