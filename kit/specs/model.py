"""The shape of a transformer: all properties of a model that planning needs."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from kit.specs.families import (
    FAMILIES,
    Activation,
    Biases,
    Family,
    Norm,
    NormPlacement,
    Positions,
    QKNorm,
    Traits,
    families_with,
)
from kit.specs.text import listed, refuse
from kit.specs.validation import Count, Name, Text, TextMapping, Within, cached, spec

_MOST_LAYERS = 2000
"""The deepest that were ever trained have 1,000 (DeepNet, arXiv 2203.00555); costs are added up layer by layer."""
_WIDEST = 2**24
"""The bound of widths, experts and vocabularies; a product of two still fits into 64 bits."""
_LONGEST_POSITION = 2**40
_LARGEST_FACTOR = 1e15
"""The bound of bases, caps and factors; the largest RoPE bases are 1e11."""
_Width = Annotated[int, Count(gt=0, le=_WIDEST)]
_Count = Annotated[int, Count(ge=0, le=_WIDEST)]
_Layers = Annotated[int, Count(ge=0, le=_MOST_LAYERS)]
_Tokens = Annotated[int, Count(gt=0, le=_LONGEST_POSITION)]
_Factor = Annotated[float, Within(ge=1e-6, le=_LARGEST_FACTOR)]
_Base = Annotated[float, Within(ge=1, le=_LARGEST_FACTOR)]


@spec
class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv 2405.04434, section 2.1). Widths per head, unless ranks."""

    kv_lora_rank: _Width
    """Width of the compressed key and value."""
    nope_head_dim: _Width
    """Part of a query or key head without positions."""
    rope_head_dim: _Width
    """Part with rotary positions; of the key one for all heads."""
    value_head_dim: _Width
    q_lora_rank: _Width | None = None
    """Width of the compressed query; null = queries are projected in one step."""

    @property
    def query_head_dim(self) -> int:
        """Width of a query or key head, both parts."""
        return self.nope_head_dim + self.rope_head_dim


@spec
class Approximation:
    """Totals over the layers of a model that no family describes, whatever kinds of layers it has."""

    config: TextMapping
    """The text model's ``config.json``, of which transformers builds it."""
    counted: bool
    """Whether transformers counted the parameters; otherwise they are estimated from the configuration."""
    parameters: Annotated[int, Count(gt=0)]
    """All parameters, each once."""
    tables: Annotated[int, Count(ge=0)]
    """Elements of matrices outside of layers: embeddings, and a head of its own."""
    matrices: Annotated[int, Count(ge=0)]
    """Elements of all layers' matrices but those of routed experts."""
    recurrent: Annotated[int, Count(ge=0)] = 0
    """The part of ``matrices`` in recurrent layers (Mamba, linear attention)."""
    experts: Annotated[int, Count(ge=0)] = 0
    """Elements of all routed experts."""
    attention_layers: Annotated[int, Count(ge=0, le=_MOST_LAYERS)]
    windowed_layers: Annotated[int, Count(ge=0, le=_MOST_LAYERS)] = 0
    """Layers of attention with the sliding window."""
    recurrent_layers: Annotated[int, Count(ge=0, le=_MOST_LAYERS)] = 0
    mlp_layers: Annotated[int, Count(ge=0, le=_MOST_LAYERS)]
    """Layers with an MLP and no routed experts."""
    state: Annotated[int, Count(ge=0)] = 0
    """Elements of one recurrent layer's state, over all heads."""
    state_width: Annotated[int, Count(ge=0)] = 0
    """Elements of a token's keys and values in a recurrent layer, over all heads."""
    norm: Norm = "rmsnorm"
    norm_placement: NormPlacement = "input"
    qk_norm: QKNorm = "none"
    gated_mlp: bool = True
    activation: Activation = "silu"
    eager_gelu: bool = False
    fused_attention: bool = True
    attention_sinks: bool = False
    fused_qkv: bool = False
    """These nine as in Traits."""


_READ_TRAITS = (
    "norm",
    "norm_placement",
    "qk_norm",
    "gated_mlp",
    "activation",
    "eager_gelu",
    "fused_attention",
    "attention_sinks",
    "fused_qkv",
)
"""Fields of Approximation that are traits."""


@spec
class ModelSpec:
    """A decoder-only transformer, or an encoder and a decoder of one width. Sizes are per model, never per rank."""

    name: Name
    """Catalog name, hub id, or the directory name of a local model."""
    family: Family
    """Decides which biases and norms exist, and which Hugging Face class builds it; see ``traits``."""
    num_layers: Annotated[int, Count(gt=0, le=_MOST_LAYERS)]
    """Transformer layers; of an encoder-decoder those of the decoder."""
    hidden_size: _Width
    """Width of the residual stream."""
    ffn_hidden_size: _Width
    """Width inside the MLP, per gate or up projection."""
    num_attention_heads: _Width
    """Query heads."""
    num_key_value_heads: _Width
    """Key/value heads (GQA); equals the query heads without GQA."""
    head_dim: _Width
    """Width of one query or key head; times the query heads it need not equal the hidden size."""
    vocab_size: _Width
    """Rows of the embedding, unpadded."""
    max_position_embeddings: _Tokens
    """Longest sequence that the model was made for."""
    tied_embeddings: bool = False
    """Whether the output projection is the input embedding."""
    norm_eps: Annotated[float, Within(ge=1e-30, le=1)] = 1e-5
    """Epsilon of RMSNorm or LayerNorm."""
    activation: Activation | None = None
    """Activation of the MLP; null = the family's."""
    biases: Biases | None = None
    """Linear layers that have a bias; null = the family's."""
    qk_norm: QKNorm | None = None
    """Which norm queries and keys have; null = the family's."""
    positions: Positions | None = None
    """Kind of position encoding; null = the family's."""
    rope_theta: _Base | None = 10000.0
    """RoPE base; null without RoPE."""
    local_rope_theta: _Base | None = None
    """RoPE base of the layers with a sliding window (Gemma 3); null = the same."""
    rope_scaling: TextMapping | None = None
    """Hugging Face's rope_parameters beyond the base (rope_type, factor, …)."""
    partial_rotary_factor: Annotated[float, Within(gt=0, le=1)] = 1.0
    """Part of a head that is rotated."""
    no_rope_every: _Layers = 0
    """Every such layer (the 4th, the 8th, …) has no RoPE; 0 = all layers have RoPE."""
    sliding_window: _Tokens | None = None
    """Positions that a token attends to, its own included; null = all previous positions."""
    full_attention_every: _Layers = 0
    """Every such layer (the 6th, the 12th, …) has full attention instead of the sliding window; 0 = none."""
    attention_softcap: _Factor | None = None
    """Attention scores go through cap·tanh(score/cap); null = unchanged."""
    logit_softcap: _Factor | None = None
    """Logits go through cap·tanh(logit/cap); null = unchanged."""
    query_pre_attn_scalar: _Width | None = None
    """Scores are divided by its root; null = by that of head_dim."""
    embedding_multiplier: _Factor = 1.0
    """Factor of the embeddings (Granite)."""
    residual_multiplier: _Factor = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    logits_divisor: _Factor = 1.0
    """Logits are divided by it."""
    parallel_residual: bool = False
    """Whether attention and MLP of a layer read the same input, and both are added to it."""
    shared_norm: bool = False
    """Whether attention and MLP of a parallel layer share one norm."""
    latent: LatentAttention | None = None
    """Keys and values are compressed; head_dim is then nope_head_dim + rope_head_dim."""
    num_experts: _Count = 0
    """Experts of a layer (mixture of experts), shared ones not counted; 0 for a dense model."""
    experts_per_token: _Count = 0
    """Experts that compute a token."""
    moe_ffn_hidden_size: _Count = 0
    """Width inside one expert; where all layers have experts, ``ffn_hidden_size`` is used by none."""
    num_shared_experts: _Count = 0
    """Experts that compute every token, of the same width."""
    first_dense_layers: _Layers = 0
    """Layers at the start that have a dense MLP instead of experts."""
    norm_topk_prob: bool = True
    """Whether the router weights of a token's experts are normalised to the sum 1."""
    router_groups: _Width = 1
    """Groups of experts, of which a token goes to ``router_top_groups``."""
    router_top_groups: _Width = 1
    routed_scaling_factor: _Factor = 1.0
    """Factor of the weights of a token's experts."""
    mtp_num_layers: _Layers = 0
    """Heads of multi-token prediction beside the layers, which job.mtp_num_layers sets."""
    encoder_layers: _Layers = 0
    """Layers of the encoder; 0 for a decoder-only model."""
    relative_attention_buckets: _Count = 0
    """T5: rows of the table of attention biases by distance, which the first layer of each stack holds for all."""
    relative_attention_max_distance: _Tokens = 128
    """T5: distances from here on share the last bucket."""
    feed_forward_proj: Literal["relu", "gated-gelu"] | None = None
    """T5: its MLP, of the first version or of 1.1."""
    scale_embedding: bool = False
    """BART, Blenderbot: whether embeddings are multiplied by the root of the hidden size."""
    approximate: Approximation | None = None
    """Family transformers: a model type that no family describes; the sizes above are then approximate."""
    source: Text = "user"
    """Where the shape was read."""

    def __post_init__(self) -> None:
        # One after the other: heads are those of a family that is known.
        refuse(_of_the_family(self))
        refuse(_of_heads(self) | _of_experts(self))

    @cached
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:
        """Computed once, because a search hashes a model thousands of times."""
        return self._hash

    @cached
    def traits(self) -> Traits:
        """The family's traits, with this model's own choices."""
        if (known := self.approximate) is not None:
            return Traits(ulysses=False, prefix="", **{name: getattr(known, name) for name in _READ_TRAITS})
        base = FAMILIES[self.family]
        own = {key: value for key in base.choices if (value := getattr(self, key)) is not None}
        if self.feed_forward_proj == "gated-gelu":
            own |= {"gated_mlp": True, "activation": "gelu_tanh"}
        return dataclasses.replace(base, **own) if own else base

    @property
    def model_type(self) -> str:
        """transformers' ``model_type``."""
        return self.family if self.approximate is None else str(self.approximate.config["model_type"])

    @cached
    def gated_mlp(self) -> bool:
        """Whether the MLP has a gate (SwiGLU): three matrices instead of two."""
        return self.traits.gated_mlp

    @property
    def mlp_width(self) -> int:
        """Inner width of a layer's MLP, or of each expert if the model has experts."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def shared_ffn_hidden_size(self) -> int:
        """Width inside all shared experts together; 0 = there are none."""
        return self.num_shared_experts * self.moe_ffn_hidden_size

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Width of all key heads together, without latent attention; the values' is the same."""
        return self.num_key_value_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of the attention's output, all heads together."""
        return self.num_attention_heads * (self.latent.value_head_dim if self.latent else self.head_dim)

    @property
    def norm(self) -> Norm:
        """Kind of normalisation."""
        return self.traits.norm

    @cached
    def learned_positions(self) -> bool:
        """Whether positions are an embedding table instead of RoPE."""
        return self.traits.positions == "learned"

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.traits.biases != "none"

    @property
    def linear_bias(self) -> bool:
        """Whether the attention output and the MLP projections have a bias."""
        return self.traits.biases == "all"

    @property
    def is_text_part(self) -> bool:
        """Whether it is a part of a model that also sees or hears, whose towers and their weights are left out."""
        return "text part" in self.source

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it maps a source to a target, each with a stack of its own."""
        return self.encoder_layers > 0

    def has_experts(self, layer: int) -> bool:
        """Whether this layer (from 0) is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.first_dense_layers

    def window(self, layer: int) -> int | None:
        """The sliding window of this layer (from 0); null where it attends to all positions. Approximately the first
        layers have it."""
        if self.approximate is not None:
            return self.sliding_window if layer < self.approximate.windowed_layers else None
        every = self.full_attention_every
        return None if every and (layer + 1) % every == 0 else self.sliding_window

    def rotates(self, layer: int) -> bool:
        """Whether queries and keys of this layer (from 0) are rotated by their positions."""
        return self.traits.positions == "rope" and not (self.no_rope_every and (layer + 1) % self.no_rope_every == 0)

    def windowed(self, seq_length: int) -> bool:
        """Whether a sliding window cuts anything off sequences of this length, in any layer."""
        if self.sliding_window is None or self.sliding_window >= seq_length:
            return False
        return any(self.window(layer) is not None for layer in range(self.num_layers))


_TAKERS = {item.name: families_with(item.name) for item in dataclasses.fields(ModelSpec)}
"""Field → the families that may have it; empty: every family has it."""


def _of_the_family(model: ModelSpec) -> dict[str, object]:
    """Reason to refuse the shape → whether it holds."""
    known, family = model.approximate, f"family {model.family}"
    reasons: dict[str, object] = {
        f"family={model.family} of {model.name}: approximate belongs to family transformers, and to no other": (
            (model.family == "transformers") != (known is not None)
        ),
        f"approximate.config of {model.name} has no model_type; give transformers' name of it": (
            known is not None and not isinstance(known.config.get("model_type"), str)
        ),
    }
    if known is not None or model.family == "transformers":
        return reasons
    traits = FAMILIES[model.family]
    for item in dataclasses.fields(ModelSpec):
        value, takers = getattr(model, item.name), _TAKERS[item.name]
        given = bool(takers) and value != item.default
        allowed = traits.choices.get(item.name, (value,))
        reasons |= {
            f"{item.name}={value} of {model.name}: {family} has none here; leave it out, or use one of "
            f"{listed(takers)}": given and model.family not in takers,
            f"{item.name}={value} of {model.name}: {family} has {' or '.join(map(str, allowed))}; use one of these": (
                given and value not in allowed
            ),
        }
    return reasons | {
        f"{name} of {model.name} is missing, which {family} needs; give it, or use another family": (
            not getattr(model, name)
        )
        for name in traits.needs
    }


def _of_heads(model: ModelSpec) -> dict[str, object]:
    traits, latent, heads, groups = model.traits, model.latent, model.num_attention_heads, model.num_key_value_heads
    width = latent.query_head_dim if latent else model.head_dim
    return {
        f"num_key_value_heads={groups} does not divide num_attention_heads={heads} of {model.name}; every key/value "
        f"head serves the same number of query heads: use a divisor of {heads}": heads % groups,
        f"num_key_value_heads={groups} of {model.name}: family {model.family} has no grouped-query attention; use "
        f"{heads}": groups != heads and (latent or not traits.grouped_queries),
        f"head_dim={model.head_dim} of {model.name}: in family {model.family} the {heads} heads split the hidden size "
        f"{model.hidden_size} evenly; use a hidden_size of {heads}·head_dim": (
            traits.even_heads and model.head_dim * heads != model.hidden_size
        ),
        f"head_dim={model.head_dim} of {model.name} is not nope_head_dim + rope_head_dim; use {width}": (
            model.head_dim != width
        ),
    }


def _of_experts(model: ModelSpec) -> dict[str, object]:
    experts, groups, top = model.num_experts, model.router_groups, model.router_top_groups
    return {
        f"experts_per_token={model.experts_per_token} of {model.name} is more than num_experts={experts}; use at most "
        f"{experts}": model.experts_per_token > experts,
        f"router_groups={groups}, router_top_groups={top} of {model.name}: groups are equal parts of num_experts="
        f"{experts}, and a token goes to at most all of them; change them": experts % groups or top > groups,
    }
