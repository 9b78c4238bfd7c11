"""The cells of the Megatron parity table: layouts down, families across, and where each planted fault must show."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kit.specs.job import OptimizerSpec
from tests.megatron import shapes


@dataclass(frozen=True)
class LayoutCase:
    """One layout, and what it asks of a model's shape."""

    layout: dict[str, Any]
    shape: dict[str, Any] = field(default_factory=dict)
    """Changes to the family's shape."""
    experts: bool | None = None
    """True: only for families with experts. False: only for those without. Null: for both."""
    packed: bool = False
    """Several documents in a row, which do not see each other."""
    common: bool = False
    """Whether every family has a cell here; otherwise those that the table is first about."""

    @property
    def world_size(self) -> int:
        """Processes."""
        return math.prod(self.layout.get(key, 1) for key in ("dp", "tp", "pp", "cp"))


@dataclass(frozen=True)
class FamilyCase:
    """One tiny model."""

    family: str
    shape: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    whole_experts: bool = False
    """Whether no layout cuts an expert: those with biases."""
    first: bool = False
    """Whether it has a cell on every layout."""
    eps: float = 3e-2
    """Adam's epsilon. With 1e-3, transformers in fp32 is 1.4e-4 from itself in fp64 after 20 steps; with 3e-2, 4e-7."""

    @property
    def job(self) -> dict[str, Any]:
        """Changes to the job."""
        return {"optimizer": OptimizerSpec(eps=self.eps, weight_decay=0.1)}


def applies(layout: LayoutCase, family: FamilyCase) -> bool:
    """Whether a family has a cell on a layout."""
    if family.whole_experts and layout.layout.get("etp", 1) > 1:
        return False
    return layout.experts in (None, family.experts) and (layout.common or family.first)


_SP = {"tp": 2, "sp": True}

LAYOUTS: dict[str, LayoutCase] = {
    "one": LayoutCase({}),
    "tp2": LayoutCase({"tp": 2}, experts=False),
    "tp2-sp": LayoutCase({**_SP, "etp": 1}, experts=False, common=True),
    "tp2-sp-etp2": LayoutCase({**_SP, "etp": 2}, experts=True, common=True),
    "tp2-sp-full": LayoutCase({**_SP, "recompute": "full"}, experts=False),
    "pp2": LayoutCase({"pp": 2}),
    "pp2-vp2": LayoutCase({"pp": 2, "vp": 2}, common=True),
    "pp2-vp2-full": LayoutCase({"pp": 2, "vp": 2, "recompute": "full"}),
    "pp2-tied": LayoutCase({"pp": 2}, {"tied_embeddings": True}),
    "pp2-uneven": LayoutCase({"pp": 2, "first_stage_layers": 1}, common=True),
    "pp2-vp2-uneven": LayoutCase({"pp": 2, "vp": 2, "first_stage_layers": 1, "last_stage_layers": 3}),
    "cp2": LayoutCase({"cp": 2}, common=True),
    "cp2-ring": LayoutCase({"cp": 2, "cp_comm_type": "p2p"}),
    "cp2-selective": LayoutCase({"cp": 2, "recompute": "selective"}),
    "dp2-distributed-optimizer": LayoutCase({"dp": 2, "zero_stage": 1}, common=True),
    "ep2": LayoutCase({"dp": 2, "ep": 2, "zero_stage": 1}, experts=True, common=True),
    "ep2-cp2": LayoutCase({"cp": 2, "ep": 2}, experts=True),
    "ep2-tp2-sp": LayoutCase({**_SP, "ep": 2}, experts=True, common=True),
    "pp4": LayoutCase({"pp": 4, "gradient_accumulation_steps": 4}),
    "pp4-vp2": LayoutCase({"pp": 4, "vp": 2}, {"num_layers": 8}),
    "pp4-uneven": LayoutCase({"pp": 4, "first_stage_layers": 1, "last_stage_layers": 1}, {"num_layers": 6}),
    "cp4": LayoutCase({"cp": 4}),
    "cp4-ring-selective": LayoutCase({"cp": 4, "cp_comm_type": "p2p", "recompute": "selective"}),
    "cp2-tp2-sp": LayoutCase({**_SP, "cp": 2}, experts=False),
    "cp2-tp2-sp-etp2": LayoutCase({**_SP, "cp": 2, "etp": 2}, experts=True),
    "dp2-pp2-vp2-ep2": LayoutCase({"dp": 2, "pp": 2, "vp": 2, "ep": 2}, experts=True),
    "dp2-tp2-sp-ep2-etp2": LayoutCase({**_SP, "dp": 2, "ep": 2, "etp": 2, "zero_stage": 1}, experts=True),
    "tp2-sp-pp2-dp2": LayoutCase({**_SP, "pp": 2, "dp": 2, "zero_stage": 1}, experts=False),
    "tp2-sp-pp2-dp2-etp2": LayoutCase({**_SP, "pp": 2, "dp": 2, "etp": 2, "zero_stage": 1}, experts=True),
    "cp2-packed": LayoutCase({"cp": 2}, packed=True, common=True),
    "tp2-sp-packed": LayoutCase({**_SP, "recompute": "full"}, experts=False, packed=True),
    "pp2-vp2-packed": LayoutCase({"pp": 2, "vp": 2}, packed=True),
    "cp4-packed": LayoutCase({"cp": 4, "recompute": "selective"}, packed=True),
    "tp2-sp-cp2-pp2": LayoutCase({**_SP, "cp": 2, "pp": 2}, experts=False),
    "tp2-sp-cp2-pp2-ep4": LayoutCase({**_SP, "cp": 2, "pp": 2, "ep": 4}, experts=True),
}

_SHAPE = {"num_layers": 4, "vocab_size": 127}  # 127: the vocabulary is padded under TP2

_MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
_DEEPSEEK = _SHAPE | shapes.DEEPSEEK | {"rope_scaling": shapes.YARN | _MSCALE}

FAMILIES: dict[str, FamilyCase] = {
    "llama": FamilyCase("llama", _SHAPE, first=True),
    "mistral": FamilyCase("mistral", _SHAPE | shapes.WINDOW),
    "qwen2": FamilyCase("qwen2", _SHAPE),
    "qwen3": FamilyCase("qwen3", _SHAPE, first=True),
    "phi3": FamilyCase("phi3", _SHAPE),
    "gpt2": FamilyCase("gpt2", _SHAPE | {"tied_embeddings": False}),
    "seed_oss": FamilyCase("seed_oss", _SHAPE),
    "smollm3": FamilyCase("smollm3", _SHAPE | shapes.NO_POSITIONS),
    "granite": FamilyCase("granite", _SHAPE | shapes.GRANITE),
    "ministral3": FamilyCase("ministral3", _SHAPE | shapes.MINISTRAL),
    "olmo2": FamilyCase("olmo2", _SHAPE),
    "olmo3": FamilyCase("olmo3", _SHAPE | shapes.OLMO3),
    "gemma2": FamilyCase("gemma2", _SHAPE | shapes.CAPPED),
    "gemma3_text": FamilyCase(
        "gemma3_text",
        _SHAPE | shapes.WINDOW | {"full_attention_every": 3, "local_rope_theta": 100.0, "query_pre_attn_scalar": 12},
    ),
    "gpt_neox": FamilyCase("gpt_neox", _SHAPE | shapes.NEOX),
    "mixtral": FamilyCase("mixtral", _SHAPE, experts=True, first=True),
    "qwen3_moe": FamilyCase("qwen3_moe", _SHAPE, experts=True, first=True),
    "deepseek_v3": FamilyCase("deepseek_v3", _DEEPSEEK, experts=True),
    "kimi_k2": FamilyCase("deepseek_v3", _DEEPSEEK | {"router_groups": 1, "router_top_groups": 1}, experts=True),
    "qwen2_moe": FamilyCase("qwen2_moe", _SHAPE | {"norm_topk_prob": False}, experts=True),
    "glm4_moe": FamilyCase("glm4_moe", _SHAPE | shapes.GLM, experts=True),
    "minimax_m2": FamilyCase("minimax_m2", _SHAPE | shapes.MINIMAX, experts=True),
    "gpt_oss": FamilyCase("gpt_oss", _SHAPE | shapes.GPT_OSS, experts=True, whole_experts=True),
}

PLANTED: dict[str, tuple[str, str]] = {
    "megatron-swap-qk": ("tp2", "llama"),
    "megatron-skip-sequence-parallel-reduction": ("tp2-sp", "llama"),
    "megatron-double-gradients": ("dp2-distributed-optimizer", "llama"),
    "megatron-batched-interleaving": ("pp2-vp2", "llama"),
    "megatron-shifted-stages": ("pp2-uneven", "llama"),
    "megatron-unbalanced-context": ("cp2", "llama"),
    "megatron-ring-forgets-a-part": ("cp4-ring-selective", "llama"),
    "megatron-swapped-experts": ("ep2", "mixtral"),
    "megatron-shared-key-of-own-heads": ("tp2-sp-etp2", "deepseek_v3"),
    "megatron-forgotten-correction": ("ep2", "deepseek_v3"),
    "megatron-norm-of-own-heads": ("tp2-sp", "olmo2"),
    "megatron-whole-residual": ("tp2-sp", "granite"),
    "megatron-ungated-shared-expert": ("ep2", "qwen2_moe"),
    "megatron-one-rotation": ("tp2-sp", "olmo3"),
    "megatron-summed-expert-biases": ("ep2-tp2-sp", "gpt_oss"),
    "megatron-joined-documents": ("cp2-packed", "llama"),
    "megatron-running-positions": ("pp2-vp2-packed", "gpt2"),
    "megatron-decayed-norms": ("tp2", "qwen3"),
}
"""Fault (tests/system/parity/faults.py) → the cell that it must turn red."""
