"""The model of a row: sizes as published; what a row does not state goes by its family."""

from __future__ import annotations

from benchmarks.accuracy.pipelines import NotPredictedError, Row
from benchmarks.accuracy.programs.published import PublishedModel, model_of
from kit.specs.model import LatentAttention

LATENT = LatentAttention(q_lora_rank=1536, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128)
"""DeepSeek-V3 (arXiv 2412.19437, section 4.2), where a row of the family does not state it."""
DENSE_FIRST = {"deepseek": 3}
"""Leading layers without experts (the same section)."""


def model_of_row(row: Row, mtp_layers: int) -> PublishedModel:
    """Sizes of the model as allocated. ``mtp_layers``: of multi-token prediction, after the last."""
    model = row["model"]
    family = str(model.get("family") or "").lower()
    gpt = family in ("gpt3", "gpt", "bloom")
    latent, bias, phi = model.get("mla"), model.get("bias", gpt), family == "phi"
    stated = latent and LatentAttention(
        q_lora_rank=latent["q_lora_rank"],
        kv_lora_rank=latent["kv_lora_rank"],
        nope_head_dim=latent["qk_head_dim"],
        rope_head_dim=latent["qk_pos_emb_head_dim"],
        value_head_dim=latent["v_head_dim"],
    )
    learned = model.get("position", "learned" if family in ("gpt3", "gpt", "mpt") else "rope") == "learned"
    return model_of(
        model,
        norm=model.get("norm") or ("layernorm" if gpt or family == "mpt" else "rmsnorm"),
        biases="all" if bias is True else "qkv" if bias == "qkv only" else "none",
        qk_norm=bool(model.get("qk_layernorm", family.startswith("qwen3"))),
        positions="learned" if learned else "rope",
        max_position_embeddings=model.get("max_position_embeddings") or model["seq_length"],
        parallel_residual=phi,
        shared_norm=phi,
        mtp_num_layers=mtp_layers,
        latent=stated or (LATENT if family.startswith("deepseek") else None),
        first_dense_layers=_dense_first(model, family),
    )


def _dense_first(model: Row, family: str) -> int:
    experts = model.get("moe") or {}
    pattern = experts.get("moe_layer_freq") or 1
    dense = DENSE_FIRST.get(family, 0) if experts else 0
    dense = len(pattern) - sum(map(bool, pattern)) if isinstance(pattern, list) else dense
    if pattern not in (1, [0] * dense + [1] * (model["num_layers"] - dense)):
        raise NotPredictedError(f"moe_layer_freq={pattern!r:.60}: dense layers among those with experts")
    return dense
