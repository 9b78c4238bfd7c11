"""LoRA's parameters on a rank of a published run (arXiv 2106.09685, section 4): r·(inputs + outputs) of each matrix."""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost.model.lora import AdaptedLayer
from kit.cost.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PublishedLora:
    """Low-rank adapters; the base model is frozen."""

    rank: int
    targets: frozenset[str]
    """Linear layers with adapters: query, key, value, projection, mlp, head."""
    four_bit: bool = False
    """QLoRA: the linear layers of the base model in nf4 (arXiv 2305.14314)."""
    fused: bool = False
    """Whether query, key and value are one linear layer with one adapter (Megatron's linear_qkv, Qwen's c_attn)."""


def adapted(workload: Workload, lora: PublishedLora) -> tuple[AdaptedLayer, ...]:
    """The linear layers with an adapter."""
    model = workload.model
    h, query, key_value, ffn = model.hidden_size, model.query_width, model.key_value_width, model.mlp_width
    widths = {"query": query, "key": key_value, "value": key_value}
    outputs = [width for name, width in widths.items() if name in lora.targets]
    found = [(h, width, "column") for width in ([sum(outputs)] if lora.fused and outputs else outputs)]
    found += [(query, h, "row")] if "projection" in lora.targets else []
    if "mlp" in lora.targets:
        found += [(h, ffn, "column")] * (2 if model.gated_mlp else 1) + [(ffn, h, "row")]
    return tuple(AdaptedLayer(workload.num_layers, "", *each) for each in found)  # type: ignore[arg-type]


def adapter_parameters(workload: Workload, lora: PublishedLora, stage: int) -> float:
    """Of one rank; tensor parallelism splits one of the two matrices, here taken as half of both."""
    model, layout = workload.model, workload.layout
    h, query, key_value = model.hidden_size, model.query_width, model.key_value_width
    sizes = {"query": h + query, "key": h + key_value, "value": h + key_value, "projection": query + h}
    sizes["mlp"] = (3 if model.gated_mlp else 2) * (h + model.mlp_width) * max(1, model.num_experts)
    each = lora.rank * sum(sizes.get(target, 0) for target in lora.targets) * len(workload.stage_layers(stage))
    if "head" in lora.targets and stage == layout.pp - 1:
        each += lora.rank * (h + model.vocab_size)
    return each * (1 + 1 / layout.tp) / 2
