"""Rows and columns of the DeepSpeed parity table, the changes of layout, and where faults must show."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kit.specs.job import Objective
from tests.system.parity.cell import BOUND

LARGE_EPS = 3e-2
"""Adam's epsilon. The root of the second moment stays small beside it, so that rounding is not amplified to a full
step. With 1e-3, transformers in fp32 is 1.4e-4 from itself in fp64 after 20 steps; with 3e-2, 4e-7."""


EXACT = {"gradient": BOUND, "loss": BOUND, "norm": BOUND}
"""Of any parameter's gradient at step 1, of any of 20 losses, of any of 20 gradient norms."""
ADAMW = EXACT | {"loss": 1e-4, "norm": 1e-4}
BF16 = {"gradient": 2e-2, "loss": 2e-4, "norm": 5e-3}
"""bf16 has 8 significant bits, 0.4 %; a gradient of another sign, scale or layer is off by more than 50 %."""


@dataclass(frozen=True)
class Column:
    """One tiny model, one kind of rows, or one way of computing."""

    family: str = "llama"
    shape: dict[str, Any] = field(default_factory=dict)
    eps: float = LARGE_EPS
    precision: str = "fp32"
    objective: Objective = "pretrain"
    bounds: dict[str, float] = field(default_factory=lambda: EXACT)


COLUMNS: dict[str, Column] = {
    "llama": Column(),
    "plain AdamW": Column(eps=1e-8, bounds=ADAMW),
    "bf16": Column(precision="bf16", bounds=BF16),
    "unequal rows": Column(objective="sft"),
    "qwen3, tied": Column("qwen3", {"tied_embeddings": True}),
    "gpt2": Column("gpt2"),
    "mixtral": Column("mixtral"),
    "t5": Column("t5", objective="seq2seq"),
    "bart": Column("bart", objective="seq2seq"),
    # Nothing below 1 MiB a rank goes to NVMe (deepspeed, swap_tensor/utils.py, MIN_AIO_BYTES).
    "wide": Column("llama", {"hidden_size": 256, "ffn_hidden_size": 2048, "head_dim": 64, "vocab_size": 2048}),
}
"""llama unless it says otherwise."""


@dataclass(frozen=True)
class Row:
    """One layout."""

    stage: int
    layout: dict[str, Any]
    columns: tuple[str, ...] = ("llama",)
    """Where it is compared: the first of its kind everywhere, its relatives where they have something of their own."""
    zero: dict[str, Any] = field(default_factory=dict)
    """Keys of zero_optimization that differ from what is emitted."""

    @property
    def world_size(self) -> int:
        """Processes."""
        return math.prod(self.layout.get(key, 1) for key in ("dp", "tp", "cp"))

    @property
    def over_megatron(self) -> bool:
        """Whether the model is Megatron-core's."""
        return "implementation" in self.layout

    @property
    def swaps(self) -> bool:
        """Whether files on NVMe must have been there."""
        return "nvme" in self.layout.values()


def _row(stage: int, *more: str, only: tuple[str, ...] = (), zero: dict[str, Any] | None = None, **layout: Any) -> Row:
    layout.setdefault("dp", 1)
    layout.setdefault("gradient_accumulation_steps", 4 // layout["dp"])
    return Row(stage, layout, only or ("llama", *more), zero or {})


_MEGATRON = {"implementation": "local", "tp": 2}
_ULYSSES = {"cp_comm_type": "a2a"}
_HOST = {"offload_optimizer": "cpu"}
_ALL_ON_HOST = {**_HOST, "offload_param": "cpu"}
_NVME = {"offload_optimizer": "nvme"}
_ALL_ON_NVME = {**_NVME, "offload_param": "nvme"}
_KINDS = ("plain AdamW", "bf16", "unequal rows", "mixtral", "t5")
_SUB_GROUPS = {"sub_group_size": 500_000}
"""So small that the matrices of a tiny model make several."""

ROWS: dict[str, Row] = {
    "dp2 ZeRO-0": _row(0, *_KINDS, "bart", dp=2),
    "dp2 ZeRO-1": _row(1, *_KINDS, dp=2),
    "dp2 ZeRO-2": _row(2, *_KINDS, "qwen3, tied", dp=2),
    "dp2 ZeRO-3": _row(3, *_KINDS, "qwen3, tied", "gpt2", "bart", dp=2),
    "dp2 ZeRO-3, experts not leaf modules": _row(3, only=("mixtral",), zero={"leaf_module": {"classes": []}}, dp=2),
    "dp2 ZeRO-3, four micro batches": _row(3, "unequal rows", dp=2, micro_batch_size=1, gradient_accumulation_steps=4),
    "dp2 ZeRO-2, one micro batch": _row(2, "bf16", dp=2, micro_batch_size=4, gradient_accumulation_steps=1),
    "dp2 ZeRO-3, recompute": _row(3, "t5", dp=2, recompute="full"),
    "dp2 ZeRO-2, optimizer on the host": _row(2, "bf16", dp=2, **_HOST),
    "dp2 ZeRO-3, all on the host": _row(3, "bf16", "mixtral", "t5", dp=2, **_ALL_ON_HOST),
    "dp2 ZeRO-3, optimizer on NVMe": _row(3, only=("wide",), zero=_SUB_GROUPS, dp=2, **_NVME),
    "dp2 ZeRO-3, all on NVMe": _row(3, only=("wide",), zero=_SUB_GROUPS, dp=2, **_ALL_ON_NVME),
    "Ulysses2 ZeRO-0": _row(0, cp=2, **_ULYSSES),
    "Ulysses2 ZeRO-1": _row(1, "bf16", cp=2, **_ULYSSES),
    "Ulysses2 ZeRO-2": _row(2, cp=2, **_ULYSSES),
    "Ulysses2 ZeRO-3": _row(3, "qwen3, tied", "mixtral", cp=2, **_ULYSSES),
    "AutoTP2 ZeRO-0": _row(0, tp=2),
    "AutoTP2 ZeRO-1": _row(1, "qwen3, tied", tp=2),
    "AutoTP2 ZeRO-2": _row(2, tp=2),
    "AutoTP2 ZeRO-3": _row(3, "bf16", "unequal rows", "qwen3, tied", tp=2),
    "Megatron TP2 ZeRO-0": _row(0, **_MEGATRON),
    "Megatron TP2 ZeRO-1": _row(1, "qwen3, tied", **_MEGATRON),
    "Megatron TP2 ZeRO-2": _row(2, **_MEGATRON),
    "Megatron TP2 ZeRO-3": _row(3, "bf16", "gpt2", **_MEGATRON),
    "Megatron TP2 + SP ZeRO-3, recompute": _row(3, **_MEGATRON, sp=True, recompute="full"),
    "dp4 ZeRO-0": _row(0, "plain AdamW", dp=4),
    "dp4 ZeRO-1": _row(1, dp=4),
    "dp4 ZeRO-2": _row(2, "t5", dp=4),
    "dp4 ZeRO-3": _row(3, "plain AdamW", "unequal rows", "mixtral", "t5", dp=4),
    "dp4 ZeRO-2, optimizer on the host": _row(2, dp=4, **_HOST),
    "dp4 ZeRO-3, all on the host": _row(3, dp=4, **_ALL_ON_HOST),
    "dp4 ZeRO-3, all on NVMe": _row(3, only=("wide",), zero=_SUB_GROUPS, dp=4, **_ALL_ON_NVME),
    "dp4 ZeRO-3, hpZ 2": _row(3, "mixtral", dp=4, zero_hpz=2),
    **{f"Ulysses4 ZeRO-{stage}": _row(stage, cp=4, **_ULYSSES) for stage in (0, 1, 2, 3)},
    **{f"Ulysses2·dp2 ZeRO-{stage}": _row(stage, cp=2, dp=2, **_ULYSSES) for stage in (2, 3)},
    **{f"AutoTP2·dp2 ZeRO-{stage}": _row(stage, tp=2, dp=2) for stage in (1, 3)},
    **{f"Megatron TP2·dp2 ZeRO-{stage}": _row(stage, dp=2, **_MEGATRON) for stage in (1, 2, 3)},
    "Megatron TP2·dp2 + SP ZeRO-3": _row(3, dp=2, **_MEGATRON, sp=True),
    "Megatron TP2·dp2 + SP ZeRO-2, optimizer on the host": _row(2, dp=2, **_MEGATRON, sp=True, **_HOST),
    "Megatron TP2·dp2 + SP ZeRO-3, all on the host": _row(3, dp=2, **_MEGATRON, sp=True, **_ALL_ON_HOST),
}

RESUMES: tuple[tuple[str, str], ...] = (
    ("dp4 ZeRO-3", "dp2 ZeRO-3"),
    ("dp2 ZeRO-2", "dp4 ZeRO-2"),
    ("dp2 ZeRO-2", "dp2 ZeRO-3"),
    ("dp2 ZeRO-3", "dp2 ZeRO-2"),
    ("dp2 ZeRO-3, all on the host", "dp2 ZeRO-3"),
    ("dp2 ZeRO-2", "dp2 ZeRO-2, optimizer on the host"),
    ("dp2 ZeRO-3", "dp2 ZeRO-3, all on NVMe"),
    ("dp2 ZeRO-3, optimizer on NVMe", "dp2 ZeRO-2"),
    ("dp2 ZeRO-0", "dp4 ZeRO-3, hpZ 2"),
    ("Ulysses2·dp2 ZeRO-3", "AutoTP2 ZeRO-1"),
    ("AutoTP2·dp2 ZeRO-3", "dp2 ZeRO-1"),
    ("Megatron TP2·dp2 + SP ZeRO-3", "dp2 ZeRO-3"),
    ("dp4 ZeRO-2", "Megatron TP2·dp2 + SP ZeRO-2, optimizer on the host"),
    ("Megatron TP2·dp2 ZeRO-1", "Megatron TP2 + SP ZeRO-3, recompute"),
)
"""(row that trains and leaves an exchange checkpoint, row that goes on)."""

PLANTED: dict[str, tuple[str, str]] = {
    "deepspeed-double-gradients": ("dp2 ZeRO-3", "llama"),
    "deepspeed-repeated-data": ("dp2 ZeRO-2", "llama"),
    "deepspeed-local-token-count": ("dp2 ZeRO-1", "unequal rows"),
    "pairs-see-padding": ("dp2 ZeRO-2", "t5"),
    "ulysses-local-positions": ("Ulysses2 ZeRO-2", "llama"),
    "ulysses-one-average": ("Ulysses2 ZeRO-3", "llama"),
    "autotp-partial-norms": ("AutoTP2 ZeRO-1", "qwen3, tied"),
    "over-megatron-partial-norms": ("Megatron TP2 + SP ZeRO-3, recompute", "llama"),
    "over-megatron-rounded-frequencies": ("Megatron TP2 ZeRO-3", "llama"),
    "hpz-stale-copy": ("dp4 ZeRO-3, hpZ 2", "llama"),
    "exchange-forgets-moments": ("dp2 ZeRO-2", "dp2 ZeRO-3"),
}
"""Fault → the cell, or for a fault of the exchange checkpoint the resume, that it must turn red."""
