"""Layouts whose gradients and curves must equal plain torch's; launchers, and runs that change engine or layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

BOUND = 1e-5
"""Largest relative error in fp32 of a gradient, ‖g − g_ref‖ / ‖g_ref‖, and of a loss or norm of any step; reductions in
another order give some 1e-7."""
STEPS = 10
"""Of a run; one that changes its layout makes the same number on each."""


@dataclass(frozen=True)
class Case:
    """Changes to the tiny recipe that select a layout."""

    name: str
    words: tuple[str, ...]
    family: str = "llama"
    """Key of ``FAMILIES``."""
    launcher: str = ""
    """``torchrun`` or ``deepspeed``; empty: launch.sh as it is emitted."""
    like: str = ""
    """The case whose numbers it must have; empty: plain torch's."""
    bound: float = BOUND
    then: tuple[tuple[str, ...], ...] = ()
    """Changes that select each of the layouts on which it goes on."""


def _case(name: str, engine: str, processes: int, *pins: str, family: str = "llama") -> Case:
    layout = [f"layout.{pin}" for pin in pins]
    return Case(name, (f"cluster={processes}xcpu", f"layout.engine={engine}", *layout), family)


def reference(family: str) -> Case:
    """What every layout of a family is compared with."""
    return _case(f"torch-1-{family}", "torch", 1, "micro_batch_size=4", family=family)


_OVER_MEGATRON = ("implementation=local", "tp=2", "sp=true")

CASES = (
    _case("torch-ddp2", "torch", 2, "micro_batch_size=2"),
    _case("torch-fsdp2-stage2", "torch", 2, "zero_stage=2", "micro_batch_size=2"),
    _case("torch-fsdp2", "torch", 2, "zero_stage=3", "micro_batch_size=2"),
    _case("deepspeed-zero1", "deepspeed", 2, "zero_stage=1", "micro_batch_size=4"),
    _case("deepspeed-zero2-accumulation", "deepspeed", 2, "zero_stage=2", "micro_batch_size=2"),
    _case("deepspeed-zero3", "deepspeed", 2, "zero_stage=3", "micro_batch_size=4"),
    _case("deepspeed-zero3-ulysses2", "deepspeed", 2, "zero_stage=3", "micro_batch_size=4", "cp=2", "cp_comm_type=a2a"),
    _case("deepspeed-zero1-autotp2", "deepspeed", 2, "zero_stage=1", "micro_batch_size=4", "tp=2"),
    _case("deepspeed-zero3-over-megatron", "deepspeed", 2, "zero_stage=3", "micro_batch_size=4", *_OVER_MEGATRON),
    _case("megatron-tp2", "megatron", 2, "tp=2", "sp=false", "micro_batch_size=4"),
    _case("megatron-tp2-sp", "megatron", 2, "tp=2", "sp=true", "micro_batch_size=4"),
    _case("megatron-pp2", "megatron", 2, "pp=2", "vp=1", "micro_batch_size=2"),
    _case("megatron-pp2-interleaved", "megatron", 2, "pp=2", "vp=2", "micro_batch_size=2"),
    _case("megatron-cp2", "megatron", 2, "tp=1", "pp=1", "cp=2", "micro_batch_size=4"),
    _case("megatron-dp2-distributed-optimizer", "megatron", 2, "tp=1", "pp=1", "zero_stage=1", "micro_batch_size=2"),
    _case("megatron-tp2-sp-mistral", "megatron", 2, "tp=2", "sp=true", "micro_batch_size=4", family="mistral"),
    _case("megatron-tp2-phi3", "megatron", 2, "tp=2", "sp=false", "micro_batch_size=4", family="phi3"),
    _case("megatron-pp2-tied-gpt2", "megatron", 2, "pp=2", "vp=1", "micro_batch_size=2", family="gpt2"),
    _case(
        "megatron-ep2-mixtral", "megatron", 2, "tp=1", "pp=1", "cp=1", "ep=2", "micro_batch_size=4", family="mixtral"
    ),
    _case(
        "megatron-tp2-ep2-qwen3-moe", "megatron", 2, "tp=2", "sp=true", "ep=2", "micro_batch_size=4", family="qwen3_moe"
    ),
    _case("deepspeed-zero3-mixtral", "deepspeed", 2, "zero_stage=3", "micro_batch_size=4", family="mixtral"),
)

_ZERO3, _TP2 = (next(case for case in CASES if case.name == name) for name in ("deepspeed-zero3", "megatron-tp2-sp"))
_ZERO2 = _case("deepspeed-zero2", "deepspeed", 2, "zero_stage=2", "micro_batch_size=4")
_FOUR = _case("over-megatron-dp2", "deepspeed", 4, "zero_stage=2", "implementation=local", "tp=2", "micro_batch_size=4")
_DP2 = _case("megatron-dp2", "megatron", 2, "tp=1", "pp=1", "cp=1", "zero_stage=1", "micro_batch_size=4")
_TORCH = _case("torch-ddp2", "torch", 2, "zero_stage=0", "micro_batch_size=2")
_TP2_PP2 = _case("megatron-tp2-pp2", "megatron", 4, "tp=2", "sp=true", "pp=2", "vp=1", "micro_batch_size=4")
_PP2 = _case("megatron-pp2", "megatron", 2, "tp=1", "pp=2", "vp=1", "micro_batch_size=4")


def _relay(*cases: Case) -> Case:
    first, *others = cases
    return Case(" → ".join(case.name for case in cases), first.words, then=tuple(case.words for case in others))


CHANGES = (
    *(
        replace(case, name=f"{case.name} by {launcher}", launcher=launcher, like=case.name, bound=0.0)
        for case in (_ZERO3, _FOUR)
        for launcher in ("deepspeed", "torchrun")
    ),
    _relay(_ZERO3, _TP2),
    _relay(_DP2, _ZERO2),
    _relay(_TP2, _PP2),
    _relay(_TORCH, _ZERO3, _TP2_PP2, _FOUR, _TORCH),
)
"""What launchers start has the same numbers to the last digit; what moves to another engine or layout goes on its
curve."""
BY_NAME = {case.name: case for case in (*CASES, _FOUR, *CHANGES)}
