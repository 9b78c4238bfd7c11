"""Parameters of LoRA's adapters (arXiv 2106.09685, section 4): r·(inputs + outputs) for every adapted matrix."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


@lru_cache(maxsize=64)
def named_layers(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Last name of each linear layer that ``lora.target_modules`` may list → (inputs, outputs). Empty where a family
    fuses projections or gives them other names. Only attention's of a model with experts, whose MLPs differ."""
    traits, h, ffn = model.traits, model.hidden_size, model.ffn_hidden_size
    fused = traits.fused_qkv or traits.fused_gate_up or traits.conv1d or model.latent is not None
    if fused or not model.gated_mlp or model.is_encoder_decoder or model.approximate is not None:
        return {}
    query, key_value = model.query_width, model.key_value_width
    attention = {"q_proj": (h, query), "k_proj": (h, key_value), "v_proj": (h, key_value), "o_proj": (query, h)}
    mlp = {"gate_proj": (h, ffn), "up_proj": (h, ffn), "down_proj": (ffn, h)}
    return attention if model.num_experts else attention | mlp


class AdaptedLayer(NamedTuple):
    """A linear layer with an adapter."""

    number: int
    """How many the model has."""
    name: str
    """Its last name by which patterns name it; empty where they cannot."""
    inputs: int
    outputs: int
    split: Literal["column", "row", "none"]
    """What tensor parallelism splits: outputs, inputs, nothing."""

    def widths(self, tp: int) -> tuple[float, float]:
        """(inputs, outputs) on one of ``tp`` tensor-parallel ranks."""
        return self.inputs / (tp if self.split == "row" else 1), self.outputs / (tp if self.split == "column" else 1)


@lru_cache(maxsize=64)
def adapted_layers(model: ModelSpec, lora: LoraSpec) -> tuple[AdaptedLayer, ...]:
    """All layers with an adapter. Routed experts are one fused tensor and get none; shared experts do
    (kit/engines/huggingface/adapters.py, target_modules)."""
    if lora.target_modules or lora.rank_pattern:
        return tuple(
            AdaptedLayer(model.num_layers, name, *widths, "row" if name in ("o_proj", "down_proj") else "column")
            for name, widths in named_layers(model).items()
            if name in lora.layers
        )
    if lora.targets == "all-linear" and model.traits.adapted_mlps:
        return linear_layers(model)
    attention = tuple(AdaptedLayer(model.num_layers, "", *each) for each in _of_attention(model))
    # peft selects modules by the last part of their name: GPT-2 calls the output of attention and of the MLP c_proj.
    widths = (model.ffn_hidden_size, model.hidden_size)
    return (*attention, *((AdaptedLayer(model.num_layers, "", *widths, "row"),) if model.traits.conv1d else ()))


@lru_cache(maxsize=64)
def linear_layers(model: ModelSpec) -> tuple[AdaptedLayer, ...]:
    """All linear layers outside of routed experts and the head."""
    h, layers = model.hidden_size, model.num_layers
    found = [AdaptedLayer(layers, "", *each) for each in _of_attention(model)]
    dense = model.first_dense_layers if model.num_experts else layers
    found += [AdaptedLayer(dense, "", *each) for each in _of_mlp(model, model.ffn_hidden_size)]
    if model.num_shared_experts:
        shared = list(_of_mlp(model, model.shared_ffn_hidden_size))
        shared += [(h, 1, "none")] if model.traits.shared_expert_gate else []
        found += [AdaptedLayer(layers - dense, "", *each) for each in shared]
    return tuple(found)


_Widths = tuple[int, int, Literal["column", "row", "none"]]


def _of_attention(model: ModelSpec) -> Iterator[_Widths]:
    """(inputs, outputs, split) of the linear layers of attention."""
    h, query, key_value = model.hidden_size, model.query_width, model.key_value_width
    if model.latent is None:
        for width in (query + 2 * key_value,) if model.traits.fused_qkv else (query, key_value, key_value):
            yield h, width, "column"
        yield query, h, "row"
        return
    latent, heads = model.latent, model.num_attention_heads
    width = heads * latent.value_head_dim
    yield h, latent.kv_lora_rank + latent.rope_head_dim, "none"
    yield latent.kv_lora_rank, heads * latent.nope_head_dim + width, "column"
    yield width, h, "row"
    if latent.q_lora_rank:
        yield h, latent.q_lora_rank, "none"
    yield latent.q_lora_rank or h, query, "column"


def _of_mlp(model: ModelSpec, width: int) -> Iterator[_Widths]:
    first = (2 * width,) if model.traits.fused_gate_up else (width,) * (2 if model.gated_mlp else 1)
    for outputs in first:
        yield model.hidden_size, outputs, "column"
    yield width, model.hidden_size, "row"


@lru_cache(maxsize=64)
def adapter_parameters_of(model: ModelSpec, lora: LoraSpec, tp: int = 1) -> float:
    """Adapter parameters of the whole model on one of ``tp`` tensor-parallel ranks. DoRA also has one for each output.

    Every rank has the whole A of a column-parallel layer, and the whole B of a row-parallel layer
    (kit/engines/megatron/model/adapted_linear.py).
    """
    total = 0.0
    for layer in adapted_layers(model, lora):
        each = lora.rank_of(layer.name) * sum(layer.widths(tp))
        total += layer.number * (each + (layer.outputs if lora.use_dora else 0))
    return total


@lru_cache(maxsize=64)
def dora_sizes(model: ModelSpec, lora: LoraSpec) -> tuple[float, float, float]:
    """(elements of the adapted weights, their outputs, bytes of temporaries): the first two of the mean layer. Zeros
    without DoRA.

    Before each GEMM (peft/tuners/lora/dora.py, DoraLinearLayer): a 16-bit identity of the inputs' width, which autograd
    keeps; B·A in 16 bits; and in fp32 B·A, the frozen weight, scale·B·A and their sum.
    """
    if not lora.use_dora:
        return 0.0, 0.0, 0.0
    layers = adapted_layers(model, lora)
    weights = sum(layer.number * layer.inputs * layer.outputs for layer in layers) / model.num_layers
    outputs = sum(layer.number * layer.outputs for layer in layers) / model.num_layers
    temporaries = max(layer.inputs * (2.0 * layer.inputs + 18.0 * layer.outputs) for layer in layers)
    return weights, outputs, temporaries
