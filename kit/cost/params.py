"""Exact parameter counts, whole and per rank. Equal to the unit to transformers' models (checked by a test)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kit.specs.model import ModelSpec


@dataclass(frozen=True)
class LayerParameters:
    """One transformer layer, by how tensor parallelism treats it."""

    attention: int
    """Query, key, value and output matrices."""
    mlp: int
    """Gate, up and down matrices (two of them without a gate) of a dense MLP."""
    experts: int
    """The same of all experts together."""
    active_experts: int
    """The part of ``experts`` that computes one token."""
    router: int
    """Scores of the experts: the same on every tensor-parallel rank."""
    split_biases: int
    """Biases that are split with their matrix: query, key, value and the MLP's first."""
    replicated: int
    """Norms, and biases added after a reduction: the same on every tensor-parallel rank."""

    @property
    def active(self) -> int:
        """Matrices that a token is multiplied with."""
        return self.attention + self.mlp + self.active_experts + self.router

    @property
    def matrices(self) -> int:
        """All matrices."""
        return self.attention + self.mlp + self.experts + self.router

    @property
    def dense(self) -> int:
        """All of the layer but its experts."""
        return self.total - self.experts

    @property
    def total(self) -> int:
        """All of the layer."""
        return self.matrices + self.split_biases + self.replicated


@dataclass(frozen=True)
class ModelParameters:
    """A whole model; a tied head counts nothing."""

    embedding: int
    """Token embedding, and the position table where positions are learned."""
    positions: int
    """The position table alone (part of ``embedding``)."""
    layer: LayerParameters
    num_layers: int
    final_norm: int
    head: int
    """Output projection; 0 where it is the embedding."""

    @property
    def total(self) -> int:
        """All parameters, each once."""
        return self.embedding + self.num_layers * self.layer.total + self.final_norm + self.head

    @property
    def active(self) -> int:
        """Parameters that take part in computing a token; all of them without experts."""
        return self.total - self.num_layers * (self.layer.experts - self.layer.active_experts)

    @property
    def layers(self) -> int:
        """All transformer layers together."""
        return self.num_layers * self.layer.total


def count(model: ModelSpec) -> ModelParameters:
    """Parameters of the Hugging Face class that computes ``model``."""
    return _count(_Key(model))


class _Key:
    """A model by identity: specs are frozen, but one that holds a dict has no hash of its own."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.model is self.model


@lru_cache(maxsize=256)  # a search asks thousands of times for the same few
def _count(key: _Key) -> ModelParameters:
    model = key.model
    h, vocab = model.hidden_size, model.vocab_size
    positions = model.max_position_embeddings * h if model.learned_positions else 0
    return ModelParameters(
        embedding=vocab * h + positions,
        positions=positions,
        layer=_layer(model),
        num_layers=model.num_layers,
        final_norm=_norm(model, h),
        head=0 if model.tied_embeddings else vocab * h,
    )


def _layer(model: ModelSpec) -> LayerParameters:
    h, f = model.hidden_size, model.mlp_width
    matrices = (3 if model.gated_mlp else 2) * h * f
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_key_value_heads * model.head_dim
    qkv_bias = query + 2 * key_value if model.qkv_bias else 0
    first_mlp_bias, after_reduction = (f, 2 * h) if model.linear_bias else (0, 0)
    qk_norms = 2 * _norm(model, model.head_dim) if model.qk_norm else 0
    return LayerParameters(
        attention=h * (query + 2 * key_value) + query * h,
        mlp=0 if model.num_experts else matrices,
        experts=model.num_experts * matrices,
        active_experts=model.experts_per_token * matrices,
        router=model.num_experts * h,
        split_biases=qkv_bias + first_mlp_bias,
        replicated=2 * _norm(model, h) + qk_norms + after_reduction,
    )


def _norm(model: ModelSpec, width: int) -> int:
    """A scale, and a shift for LayerNorm."""
    return width if model.norm == "rmsnorm" else 2 * width


def largest_layer(model: ModelSpec) -> int:
    """Parameters of the largest module that is gathered at once under ZeRO-3: a layer or the embedding."""
    counts = count(model)
    return max(counts.layer.total, counts.embedding)


def rank_experts(model: ModelSpec, pp: int, ep: int, etp: int, layers: int | None = None) -> int:
    """Parameters of experts that one rank of a pipeline stage of ``layers`` layers holds; null: an even share."""
    layers = model.num_layers // pp if layers is None else layers
    return layers * count(model).layer.experts // (ep * etp)


def rank_parameters(model: ModelSpec, tp: int, pp: int, stage: int, layers: int | None = None) -> int:
    """Parameters that one rank of pipeline stage ``stage`` holds beside experts: matrices split over ``tp``, the
    vocabulary padded. ``layers``: of the stage; null: an even share.

    megatron-core: embedding on the first stage, final norm and head on the last, and with tied embeddings a second
    copy of the embedding there (models/common/language_module/language_module.py).
    """
    counts = count(model)
    layer = counts.layer
    per_layer = (layer.attention + layer.mlp + layer.split_biases) // tp + layer.replicated + layer.router
    local = (model.num_layers // pp if layers is None else layers) * per_layer
    vocabulary = -(-model.vocab_size // tp) * model.hidden_size
    if stage == 0:
        local += vocabulary + counts.positions
    if stage == pp - 1:
        local += counts.final_norm
        if counts.head or pp > 1:
            local += vocabulary
    return local
