"""Exact parameter counts, of the model and per rank. A test compares every count with transformers' own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from kit.specs.layout import Layout
from kit.specs.model import Approximation, ModelSpec
from kit.specs.validation import cached


class LayerParameters(NamedTuple):
    """Parameters of one transformer layer, grouped by how tensor parallelism splits them."""

    attention: int
    """Query, key, value and output matrices; for latent attention, only the matrices that are split."""
    latent: int
    """Down-projections of latent attention: the same on every tensor-parallel rank."""
    mlp: int
    """Gate, up and down matrices (two of them without a gate) of a dense MLP, or of the shared experts."""
    experts: int
    """Gate, up and down matrices of all routed experts together."""
    active_experts: int
    """The part of ``experts`` that computes one token."""
    expert_biases: int
    """Biases of all experts."""
    router: int
    """The router's weight: the same on every tensor-parallel rank."""
    split_biases: int
    """Split vectors: biases of query, key, value and the MLP's first matrix; attention sinks; norms over the whole
    width of queries or keys."""
    replicated: int
    """Norms, the gate of shared experts, biases added after an all-reduce: the same on every tensor-parallel rank."""

    @property
    def active(self) -> int:
        """Elements of the matrices that a token is multiplied with."""
        return self.attention + self.latent + self.mlp + self.active_experts + self.router

    @property
    def matrices(self) -> int:
        """Elements of all matrices."""
        return self.attention + self.latent + self.mlp + self.experts + self.router

    @property
    def routed(self) -> int:
        """The routed experts with their biases."""
        return self.experts + self.expert_biases

    @property
    def total(self) -> int:
        """All of the layer."""
        return self.matrices + self.expert_biases + self.split_biases + self.replicated


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameter counts on one rank. Dense parameters have dp·cp replicas, experts dp·cp·tp/(ep·etp)."""

    dense_matrices: float
    vectors: float
    """Norms and biases."""
    vocabulary: float
    """Embedding, position table, head. A tied head on the embedding's stage is not counted twice."""
    experts: float

    @cached
    def dense(self) -> float:
        """Everything but experts."""
        return self.dense_matrices + self.vectors + self.vocabulary

    @cached
    def total(self) -> float:
        """All parameters of the rank."""
        return self.dense + self.experts


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """Parameter counts of a whole model; a tied head is counted once, as the embedding."""

    embedding: int
    """Token embedding with its norm, and the position tables where positions are learned (or their biases)."""
    positions: int
    """The position tables alone (part of ``embedding``)."""
    layer: LayerParameters
    """A layer. For a mixture of experts: a layer with experts. For an encoder-decoder: a decoder layer with its
    cross-attention."""
    num_layers: int
    first_layer: LayerParameters
    """A layer without experts and without cross-attention; for an approximate model, the mean layer."""
    first_layers: int
    """Number of leading dense layers, out of ``num_layers``."""
    final_norm: int
    """Norms outside of layers, of both stacks."""
    head: int
    """Output projection; 0 where it is the embedding."""
    prediction_heads: int = 0
    """All heads of multi-token prediction together: a layer, a projection of 2h onto h, three norms each. They share
    embedding and output projection with the model."""
    encoder_layer: LayerParameters | None = None
    encoder_layers: int = 0

    @cached
    def total(self) -> int:
        """All parameters, each once."""
        return self.embedding + self.layers + self.final_norm + self.head + self.prediction_heads

    @cached
    def layers(self) -> int:
        """All transformer layers together, of both stacks."""
        return self._of_both_stacks(lambda layer: layer.total)

    @cached
    def layer_matrices(self) -> int:
        """The matrices of all layers together, of both stacks."""
        return self._of_both_stacks(lambda layer: layer.matrices)

    @cached
    def active_matrices(self) -> int:
        """Elements of the matrices that one token is multiplied with, of both stacks."""
        return self._of_both_stacks(lambda layer: layer.active)

    def _of_both_stacks(self, part: Callable[[LayerParameters], int]) -> int:
        encoder = self.encoder_layers * part(self.encoder_layer) if self.encoder_layer else 0
        return self.sum_over(range(self.num_layers), part) + encoder

    def sum_over(self, layers: Sequence[int], part: Callable[[LayerParameters], int]) -> int:
        """Sum of ``part`` over the decoder layers with these numbers."""
        first = sum(layer < self.first_layers for layer in layers) if self.first_layers else 0
        return first * part(self.first_layer) + (len(layers) - first) * part(self.layer)


@lru_cache(maxsize=256)  # a search asks thousands of times for the same few
def count(model: ModelSpec) -> ModelParameters:
    """Parameters of the Hugging Face class that computes ``model``."""
    if model.approximate is not None:
        return _mean_layer(model, model.approximate)
    traits, h, vocab = model.traits, model.hidden_size, model.vocab_size
    positions = (model.max_position_embeddings + traits.position_offset) * h if model.learned_positions else 0
    positions += model.relative_attention_buckets * model.num_attention_heads
    stacks = 2 if model.is_encoder_decoder else 1
    layer = _layer(model, with_experts=model.num_experts > 0)
    return ModelParameters(
        embedding=vocab * h + stacks * (positions + (_norm(model, h) if traits.embedding_norm else 0)),
        positions=stacks * positions,
        layer=_with_cross_attention(model, layer) if model.is_encoder_decoder else layer,
        num_layers=model.num_layers,
        first_layer=_layer(model, with_experts=False),
        first_layers=min(model.first_dense_layers, model.num_layers),
        final_norm=0 if traits.norm_placement == "sum" else stacks * _norm(model, h),
        head=0 if model.tied_embeddings else vocab * h,
        prediction_heads=model.mtp_num_layers * (layer.total + _joining(model)),
        encoder_layer=layer if model.is_encoder_decoder else None,
        encoder_layers=model.encoder_layers,
    )


def _joining(model: ModelSpec, tp: int = 1) -> int:
    """Projection and norms of a head of multi-token prediction, on a rank (megatron-core,
    transformer/multi_token_prediction.py)."""
    h = model.hidden_size
    return 2 * h * h // tp + 3 * _norm(model, h)


def _mean_layer(model: ModelSpec, known: Approximation) -> ModelParameters:
    """Every layer is the mean of all layers; ``final_norm`` has all norms, biases and the remainder of the division."""
    layers, head = model.num_layers, 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    matrices, experts = known.matrices // layers, known.experts // layers
    layer = LayerParameters(matrices, 0, 0, experts, 0, 0, 0, 0, 0)
    layer = layer._replace(active_experts=experts * model.experts_per_token // max(model.num_experts, 1))
    return ModelParameters(
        embedding=known.tables - head,
        positions=0,
        layer=layer,
        num_layers=layers,
        first_layer=layer,
        first_layers=0,
        final_norm=known.parameters - known.tables - layers * layer.total,
        head=head,
    )


def _with_cross_attention(model: ModelSpec, layer: LayerParameters) -> LayerParameters:
    """The decoder layer with cross-attention (keys and values from the encoder's output) and its norm."""
    h, query = model.hidden_size, model.num_attention_heads * model.head_dim
    return layer._replace(
        attention=2 * layer.attention,
        split_biases=layer.split_biases + (3 * query if model.qkv_bias else 0),
        replicated=layer.replicated + _norm(model, h) + (h if model.linear_bias else 0),
    )


def _layer(model: ModelSpec, with_experts: bool) -> LayerParameters:
    h, heads = model.hidden_size, model.num_attention_heads
    biases = model.linear_bias
    attention, latent = _attention(model)
    query, key_value = model.query_width, model.key_value_width
    split = (query + 2 * key_value if model.qkv_bias else 0) + (heads if model.traits.attention_sinks else 0)
    split += query + key_value if model.traits.qk_norm == "width" else 0
    replicated = _norms(model) + (h if biases else 0)
    experts = experts_biases = router = 0
    if with_experts:
        experts = model.num_experts * _mlp(model, model.moe_ffn_hidden_size)
        mlp = _mlp(model, model.shared_ffn_hidden_size)
        router = model.num_experts * h
        replicated += h if model.traits.shared_expert_gate else 0
        if biases:
            experts_biases = model.num_experts * ((2 if model.gated_mlp else 1) * model.moe_ffn_hidden_size + h)
            replicated += model.num_experts
    else:
        mlp = _mlp(model, model.ffn_hidden_size)
        if biases:
            split, replicated = split + (2 if model.gated_mlp else 1) * model.ffn_hidden_size, replicated + h
    return LayerParameters(
        attention=attention,
        latent=latent,
        mlp=mlp,
        experts=experts,
        active_experts=experts * model.experts_per_token // max(model.num_experts, 1),
        expert_biases=experts_biases,
        router=router,
        split_biases=split,
        replicated=replicated,
    )


def _attention(model: ModelSpec) -> tuple[int, int]:
    """Elements of (matrices that tensor parallelism splits over heads, down-projections of latent attention)."""
    h, heads = model.hidden_size, model.num_attention_heads
    query = heads * model.head_dim
    latent = model.latent
    if latent is None:
        return 2 * h * query + 2 * h * model.num_key_value_heads * model.head_dim, 0
    up = latent.kv_lora_rank * heads * (latent.nope_head_dim + latent.value_head_dim)
    output = heads * latent.value_head_dim * h
    down = h * (latent.kv_lora_rank + latent.rope_head_dim)
    if latent.q_lora_rank is None:
        return h * query + up + output, down
    return latent.q_lora_rank * query + up + output, down + h * latent.q_lora_rank


def _mlp(model: ModelSpec, width: int) -> int:
    return (3 if model.gated_mlp else 2) * model.hidden_size * width


def _norms(model: ModelSpec) -> int:
    """Norm parameters of a layer: around attention and MLP, of query and key heads, of compressed states."""
    around = 4 if model.traits.norm_placement == "both" else 1 if model.shared_norm else 2
    if model.latent:
        compressed = model.latent.kv_lora_rank + (model.latent.q_lora_rank or 0)
        return around * _norm(model, model.hidden_size) + _norm(model, compressed)
    heads = 2 * model.head_dim if model.traits.qk_norm == "head" else 0
    return around * _norm(model, model.hidden_size) + _norm(model, heads)


def _norm(model: ModelSpec, width: int) -> int:
    """A scale, and a shift for LayerNorm."""
    return width if model.norm == "rmsnorm" else 2 * width


def rank_experts(
    model: ModelSpec, pp: int, ep: int, etp: int, stage: int = -1, layers: Sequence[int] | None = None
) -> int:
    """Expert parameters on one rank of a pipeline stage; by default of the last stage, which has no dense layers.
    ``layers``: layer numbers of the stage; None: an even split."""
    layers, counts = _even(model, pp, stage) if layers is None else layers, count(model)
    experts = counts.sum_over(layers, lambda layer: layer.routed)
    if stage % pp == pp - 1:
        experts += model.mtp_num_layers * counts.layer.routed
    return experts // (ep * etp)


def rank_parameters(model: ModelSpec, tp: int, pp: int, stage: int, layers: Sequence[int] | None = None) -> int:
    """Parameters on one rank of pipeline stage ``stage``, without experts: matrices split over ``tp``, vocabulary
    padded to a multiple of it. ``layers``: layer numbers of the stage; None: an even split.

    megatron-core: embedding on the first stage, final norm and head on the last, and with tied embeddings or heads of
    multi-token prediction a second copy of the embedding there (models/common/language_module/language_module.py).
    """
    counts = count(model)

    def on_rank(layer: LayerParameters) -> int:
        split = (layer.attention + layer.mlp + layer.split_biases) // tp
        return split + layer.latent + layer.replicated + layer.router

    local = counts.sum_over(_even(model, pp, stage) if layers is None else layers, on_rank)
    vocabulary = -(-model.vocab_size // tp) * model.hidden_size
    if stage == 0:
        local += vocabulary + counts.embedding - model.vocab_size * model.hidden_size
    if stage == pp - 1:
        local += counts.final_norm
        local += vocabulary * _last_tables(model, pp)
        local += model.mtp_num_layers * (on_rank(counts.layer) + _joining(model, tp))
    return local


def _last_tables(model: ModelSpec, pp: int) -> int:
    """Tables of the vocabulary on the last stage, without the one that it has as the first stage."""
    head = int(not model.tied_embeddings or pp > 1)
    return head + int(pp > 1 and model.mtp_num_layers > 0 and not model.tied_embeddings)


def _even(model: ModelSpec, pp: int, stage: int) -> range:
    size = model.num_layers // pp
    return range(stage % pp * size, (stage % pp + 1) * size)


def stage_parameters(
    model: ModelSpec, layout: Layout, chunks: tuple[tuple[int, ...], ...]
) -> tuple[RankParameters, ...]:
    """Parameter counts on a rank of each pipeline stage, in the engine's own layout; a Hugging Face model's encoder is
    included. ``chunks``: layer numbers of every pipeline chunk."""
    whole = layout.implementation == "huggingface" and layout.tp == 1
    found = _of_stages(model, chunks, layout.tp, layout.pp, layout.ep * layout.etp, whole)
    if layout.engine == "torch" and layout.tp > 1:
        # The torch engine splits only the layers' matrices; embedding and head stay whole (torch/tensor_parallel.py).
        counts = count(model)
        found = tuple(replace(each, vocabulary=float(counts.embedding + counts.head)) for each in found)
    return found


@lru_cache(maxsize=4096)  # layouts share them
def _of_stages(
    model: ModelSpec, chunks: tuple[tuple[int, ...], ...], tp: int, pp: int, expert_ranks: int, whole: bool
) -> tuple[RankParameters, ...]:
    stages = (tuple(layer for chunk in chunks[stage::pp] for layer in chunk) for stage in range(pp))
    return tuple(_counted(model, layers, tp, pp, stage, expert_ranks, whole) for stage, layers in enumerate(stages))


def _counted(
    model: ModelSpec, layers: tuple[int, ...], tp: int, pp: int, stage: int, expert_ranks: int, whole: bool
) -> RankParameters:
    counts = count(model)
    experts = rank_experts(model, pp, expert_ranks, 1, stage, layers)
    if whole:
        dense = counts.total - experts * expert_ranks
        vocabulary = float(counts.embedding + counts.head)
    else:
        dense = rank_parameters(model, tp, pp, stage, layers)
        tables = int(stage == 0) + (_last_tables(model, pp) if stage == pp - 1 else 0)
        vocabulary = float(-(-model.vocab_size // tp) * model.hidden_size * tables)
        vocabulary += counts.positions if stage == 0 else 0
    vectors = counts.sum_over(layers, lambda layer: layer.replicated) + (
        counts.sum_over(layers, lambda layer: layer.split_biases) / tp
    )
    if stage == pp - 1:
        vectors += counts.final_norm
        vectors += model.mtp_num_layers * (
            counts.layer.replicated + counts.layer.split_biases / tp + 3 * _norm(model, model.hidden_size)
        )
    return RankParameters(
        dense_matrices=dense - vocabulary - vectors, vectors=vectors, vocabulary=vocabulary, experts=experts
    )


def dense_layer_matrices(model: ModelSpec, layout: Layout) -> float:
    """Elements of a dense layer's matrices on one rank. A rank has at least one whole key and value head."""
    layer = count(model).first_layer
    missing = max(0.0, 1 - model.num_key_value_heads / layout.tp) if model.latent is None else 0.0
    copies = 2 * model.hidden_size * model.head_dim * missing
    return (layer.attention + layer.mlp) / layout.tp + layer.latent + copies
