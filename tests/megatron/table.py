"""Families and layouts of which every pair that makes sense is compared: layouts down, families across."""

from __future__ import annotations

from typing import Any

from tests.megatron import shapes

_SP = {"tp": 2, "sp": True}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp2-sp": ({**_SP, "etp": 1}, {}),
    "tp2-sp-etp2": ({**_SP, "etp": 2}, {}),
    "tp2-sp-full": ({**_SP, "recompute": "full"}, {}),
    "pp2": ({"pp": 2}, {}),
    "pp2-vp2": ({"pp": 2, "vp": 2}, {}),
    "pp2-vp2-full": ({"pp": 2, "vp": 2, "recompute": "full"}, {}),
    "pp2-tied": ({"pp": 2}, {"tied_embeddings": True}),
    "pp2-uneven": ({"pp": 2, "first_stage_layers": 1}, {}),
    "pp2-vp2-uneven": ({"pp": 2, "vp": 2, "first_stage_layers": 1, "last_stage_layers": 3}, {}),
    "cp2": ({"cp": 2}, {}),
    "cp2-ring": ({"cp": 2, "cp_comm_type": "p2p"}, {}),
    "cp2-selective": ({"cp": 2, "recompute": "selective"}, {}),
    "tp2-sp-mlp": ({**_SP, "etp": 1, "recompute": "selective", "recompute_modules": ("core_attn", "mlp")}, {}),
    "ep2-tp2-sp-moe": ({**_SP, "ep": 2, "recompute": "selective", "recompute_modules": ("mlp", "moe")}, {}),
    "dp2-distributed-optimizer": ({"dp": 2, "zero_stage": 1}, {}),
    "ep2": ({"dp": 2, "ep": 2, "zero_stage": 1}, {}),
    "ep2-cp2": ({"cp": 2, "ep": 2}, {}),
    "ep2-tp2-sp": ({**_SP, "ep": 2}, {}),
    "pp4": ({"pp": 4, "gradient_accumulation_steps": 4}, {}),
    "pp4-vp2": ({"pp": 4, "vp": 2}, {"num_layers": 8}),
    "pp4-uneven": ({"pp": 4, "first_stage_layers": 1, "last_stage_layers": 1}, {"num_layers": 6}),
    "cp4": ({"cp": 4}, {}),
    "cp4-ring-selective": ({"cp": 4, "cp_comm_type": "p2p", "recompute": "selective"}, {}),
    "cp2-tp2-sp": ({**_SP, "cp": 2}, {}),
    "cp2-tp2-sp-etp2": ({**_SP, "cp": 2, "etp": 2}, {}),
    "dp2-pp2-vp2-ep2": ({"dp": 2, "pp": 2, "vp": 2, "ep": 2}, {}),
    "dp2-tp2-sp-ep2-etp2": ({**_SP, "dp": 2, "ep": 2, "etp": 2, "zero_stage": 1}, {}),
    "tp2-sp-pp2-dp2": ({**_SP, "pp": 2, "dp": 2, "zero_stage": 1}, {}),
    "tp2-sp-pp2-dp2-etp2": ({**_SP, "pp": 2, "dp": 2, "etp": 2, "zero_stage": 1}, {}),
    "cp2-packed": ({"cp": 2}, {}),
    "tp2-sp-packed": ({**_SP, "recompute": "full"}, {}),
    "pp2-vp2-packed": ({"pp": 2, "vp": 2}, {}),
    "cp4-packed": ({"cp": 4, "recompute": "selective"}, {}),
    "tp2-sp-cp2-pp2": ({**_SP, "cp": 2, "pp": 2}, {}),
    "tp2-sp-cp2-pp2-ep4": ({**_SP, "cp": 2, "pp": 2, "ep": 4}, {}),
}
"""Name → the layout, and changes to a family's shape."""
WITH_EXPERTS = {
    "ep2-tp2-sp-moe",
    "tp2-sp-etp2",
    "ep2",
    "ep2-cp2",
    "ep2-tp2-sp",
    "cp2-tp2-sp-etp2",
    "dp2-pp2-vp2-ep2",
    "dp2-tp2-sp-ep2-etp2",
    "tp2-sp-pp2-dp2-etp2",
    "tp2-sp-cp2-pp2-ep4",
}
WITHOUT_EXPERTS = {
    "tp2",
    "tp2-sp",
    "tp2-sp-full",
    "tp2-sp-mlp",
    "cp2-tp2-sp",
    "tp2-sp-pp2-dp2",
    "tp2-sp-packed",
    "tp2-sp-cp2-pp2",
}
COMMON = {
    "tp2-sp",
    "tp2-sp-etp2",
    "pp2-vp2",
    "pp2-uneven",
    "cp2",
    "dp2-distributed-optimizer",
    "ep2",
    "ep2-tp2-sp",
    "cp2-packed",
}
"""Layouts of every family; the others are those of ``FIRST`` alone."""
PACKED = {"cp2-packed", "tp2-sp-packed", "pp2-vp2-packed", "cp4-packed"}
"""Several documents in a row, which do not see each other."""
_SHAPE = {"num_layers": 4, "vocab_size": 127}  # 127: the vocabulary is padded under TP2
_DEEPSEEK = _SHAPE | shapes.DEEPSEEK | {"rope_scaling": shapes.YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": ("llama", _SHAPE),
    "mistral": ("mistral", _SHAPE | shapes.WINDOW),
    "qwen2": ("qwen2", _SHAPE),
    "qwen3": ("qwen3", _SHAPE),
    "phi3": ("phi3", _SHAPE),
    "gpt2": ("gpt2", _SHAPE | {"tied_embeddings": False}),
    "seed_oss": ("seed_oss", _SHAPE),
    "smollm3": ("smollm3", _SHAPE | shapes.NO_POSITIONS),
    "granite": ("granite", _SHAPE | shapes.GRANITE),
    "ministral3": ("ministral3", _SHAPE | shapes.MINISTRAL),
    "olmo2": ("olmo2", _SHAPE),
    "olmo3": ("olmo3", _SHAPE | shapes.OLMO3),
    "gemma2": ("gemma2", _SHAPE | shapes.CAPPED),
    "gemma3_text": (
        "gemma3_text",
        _SHAPE | shapes.WINDOW | {"full_attention_every": 3, "local_rope_theta": 100.0, "query_pre_attn_scalar": 12},
    ),
    "gpt_neox": ("gpt_neox", _SHAPE | shapes.NEOX),
    "mixtral": ("mixtral", _SHAPE),
    "qwen3_moe": ("qwen3_moe", _SHAPE),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "kimi_k2": ("deepseek_v3", _DEEPSEEK | {"router_groups": 1, "router_top_groups": 1}),
    "qwen2_moe": ("qwen2_moe", _SHAPE | {"norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", _SHAPE | shapes.GLM),
    "minimax_m2": ("minimax_m2", _SHAPE | shapes.MINIMAX),
    "gpt_oss": ("gpt_oss", _SHAPE | shapes.GPT_OSS),
}
FIRST = {"llama", "qwen3", "mixtral", "qwen3_moe"}
OF_EXPERTS = {"mixtral", "qwen3_moe", "deepseek_v3", "kimi_k2", "qwen2_moe", "glm4_moe", "minimax_m2", "gpt_oss"}
EPS = 3e-2
"""Adam's epsilon, so large that rounding is not amplified. With 1e-3, transformers in fp32 is 1.4e-4 from itself in
fp64 after 20 steps; with 3e-2, 4e-7."""
CELLS = [
    f"{layout} {family}"
    for layout in LAYOUTS
    for family in FAMILIES
    if (layout in COMMON or family in FIRST)
    and layout not in (WITHOUT_EXPERTS if family in OF_EXPERTS else WITH_EXPERTS)
    and not (family == "gpt_oss" and "etp" in LAYOUTS[layout][0] and LAYOUTS[layout][0]["etp"] > 1)
]
"""No layout cuts an expert of gpt-oss, which has biases."""
