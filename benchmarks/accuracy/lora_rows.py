"""Adapters of a published run: rank, targets and 4-bit weights are fields of a row."""

from __future__ import annotations

from typing import Literal

from benchmarks.accuracy.fields import engine_of, megatron_layers, unknown
from benchmarks.accuracy.pipelines import NotPredictedError, Row
from benchmarks.accuracy.programs.adapters import PublishedLora
from kit.specs.job import LoraSpec

TARGETS = {
    "query": ("query", "q", "q_proj"),
    "key": ("key", "k", "k_proj"),
    "value": ("value", "v", "v_proj"),
    "projection": ("projection", "o", "o_proj", "output_proj", "linear_proj"),
    "mlp": ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "linear_fc1", "linear_fc2"),
    "head": ("head",),
}
"""Linear layers with adapters → their names in rows."""
FUSED = {
    "all-linear": ("query", "key", "value", "projection", "mlp"),
    "c_attn": ("query", "key", "value"),
    "linear_qkv": ("query", "key", "value"),
    "c_proj": ("projection", "mlp"),
}
"""Names that stand for several; Qwen's c_proj is the output of attention and of the MLP."""
PRESETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "megatron": (32, ("linear_qkv",)),
    "ddp": (64, ("q_proj", "v_proj", "output_proj", "mlp")),
}
"""Engine → rank and targets where a row says that adapters were trained and nothing more: NVIDIA's recipes for speed
(NeMo's launcher; Megatron-Bridge, perf_recipes), torchtune's of Llama 3.2 (recipes/configs/llama3_2/3B_lora.yaml)."""


def lora_of(row: Row) -> PublishedLora | None:
    """Adapters: ``true`` for the program's preset, or an object with ``rank``, ``targets`` and ``four_bit`` or
    ``quant``."""
    stated = row["job"].get("lora")
    if not stated:
        return None
    lora = stated if isinstance(stated, dict) else {}
    rank, targets = (
        PRESETS.get(engine_of(row), (None, ())) if stated is True else (lora.get("rank"), lora.get("targets"))
    )
    if not rank:
        raise NotPredictedError("adapters of unstated rank")
    found: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets or ():
        known = FUSED.get(target) or [name for name, names in TARGETS.items() if target in names]
        if not known:
            raise unknown("job.lora.targets", target)
        found.update(known)
    words = f"{lora.get('quant')} {row['job'].get('quantize')}"
    four_bit = bool(lora.get("four_bit")) or "nf4" in words or (stated is True and "QLoRA" in str(row.get("notes")))
    fused = megatron_layers(row) or "c_attn" in (targets or ())
    return PublishedLora(rank=rank, targets=frozenset(found), four_bit=four_bit, fused=fused)


def lora_spec(lora: PublishedLora) -> LoraSpec:
    """What kit's terms say of the adapters; their layers are the published ones."""
    targets: Literal["attention", "all-linear"] = "all-linear" if "mlp" in lora.targets else "attention"
    return LoraSpec(rank=lora.rank, four_bit=lora.four_bit, targets=targets)
