"""The shape of a transformer: all that planning needs to know about a model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kit.errors import SpecError
from kit.specs.base import SPEC

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe", "t5", "bart", "blenderbot"
]

WINDOWED: tuple[Family, ...] = ("mistral", "phi3", "mixtral")
"""Families whose attention may have a sliding window."""
WITH_EXPERTS: tuple[Family, ...] = ("mixtral", "qwen3_moe")
"""Families whose MLPs are mixtures of experts, in every layer."""
ENCODER_DECODER: tuple[Family, ...] = ("t5", "bart", "blenderbot")
"""Families of two stacks: an encoder reads the source, a decoder writes the target and attends to the encoder."""
_WITH_BIASES: tuple[Family, ...] = ("gpt2", "bart", "blenderbot")
"""LayerNorm, learned positions, biases everywhere, no gate."""


@dataclass(frozen=True, kw_only=True, config=SPEC)
class ModelSpec:
    """A decoder-only transformer, or an encoder and a decoder of one width. Sizes are per model, never per rank."""

    name: str
    """Catalog name, hub id, or the directory name of a local model."""
    family: Family
    """Decides which biases and norms exist, and which Hugging Face class builds it."""
    num_layers: int = Field(gt=0)
    """Transformer layers; of an encoder-decoder those of the decoder."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    ffn_hidden_size: int = Field(gt=0)
    """Width inside the MLP, per gate or up projection."""
    num_attention_heads: int = Field(gt=0)
    """Query heads."""
    num_key_value_heads: int = Field(gt=0)
    """Key/value heads (GQA); equals the query heads without GQA."""
    head_dim: int = Field(gt=0)
    """Width of one head; times the query heads it need not equal the hidden size."""
    vocab_size: int = Field(gt=0)
    """Rows of the embedding, unpadded."""
    max_position_embeddings: int = Field(gt=0)
    """Longest sequence that the model was made for."""
    tied_embeddings: bool = False
    """Whether the output projection is the input embedding."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of RMSNorm or LayerNorm."""
    rope_theta: float | None = Field(default=10000.0, gt=0)
    """RoPE base; null for learned positions."""
    rope_scaling: dict[str, Any] | None = None
    """Hugging Face's rope_parameters beyond the base (rope_type, factor, …)."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Positions that a token attends to, its own included; null for all before it. The same in every layer."""
    num_experts: int = Field(default=0, ge=0)
    """Experts of every layer (mixture of experts); 0 for a dense model."""
    experts_per_token: int = Field(default=0, ge=0)
    """Experts that compute a token."""
    moe_ffn_hidden_size: int = Field(default=0, ge=0)
    """Width inside one expert; Mixtral's equals ``ffn_hidden_size``, which Qwen3-MoE's layers do not use."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts are made to add up to 1."""
    encoder_layers: int = Field(default=0, ge=0)
    """Layers of the encoder; 0 for a decoder-only model."""
    relative_attention_buckets: int = Field(default=0, ge=0)
    """T5: rows of the table of attention biases by distance, which the first layer of each stack holds for all."""
    relative_attention_max_distance: int = Field(default=128, gt=0)
    """T5: distances from here on share the last bucket."""
    feed_forward_proj: Literal["relu", "gated-gelu"] | None = None
    """T5: its MLP, of the first version or of 1.1."""
    scale_embedding: bool = False
    """BART, Blenderbot: whether embeddings are multiplied by the root of the hidden size."""
    source: str = "user"
    """Where the shape was read."""

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.family not in WINDOWED:
            raise SpecError(
                f"sliding_window={self.sliding_window} of {self.name}: family {self.family} has none here; "
                f"leave it out, or use one of {', '.join(WINDOWED)}"
            )
        sizes = (self.num_experts, self.experts_per_token, self.moe_ffn_hidden_size)
        if (self.family in WITH_EXPERTS) != all(sizes) or any(sizes) != all(sizes):
            raise SpecError(
                f"num_experts={sizes[0]}, experts_per_token={sizes[1]}, moe_ffn_hidden_size={sizes[2]} of {self.name}: "
                f"families {' and '.join(WITH_EXPERTS)} need all three, the others none; change them, or the family"
            )
        two_stacks = self.family in ENCODER_DECODER
        if two_stacks != bool(self.encoder_layers):
            raise SpecError(
                f"encoder_layers={self.encoder_layers} of {self.name}: families {', '.join(ENCODER_DECODER)} have an "
                "encoder, the others none; change it, or the family"
            )
        is_t5 = self.family == "t5"
        if is_t5 != bool(self.relative_attention_buckets) or is_t5 != (self.feed_forward_proj is not None):
            raise SpecError(
                f"relative_attention_buckets={self.relative_attention_buckets}, feed_forward_proj="
                f"{self.feed_forward_proj} of {self.name}: T5 needs both, the others have neither; change them"
            )
        if self.experts_per_token > self.num_experts:
            raise SpecError(
                f"experts_per_token={self.experts_per_token} of {self.name} is more than num_experts="
                f"{self.num_experts}; use at most {self.num_experts}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise SpecError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads} of {self.name}; every key/value head serves the "
                f"same number of query heads: use a divisor of {self.num_attention_heads}"
            )

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP has a gate (SwiGLU): three matrices instead of two."""
        return self.family not in (*_WITH_BIASES, "t5") or self.feed_forward_proj == "gated-gelu"

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP that a layer really has: of the one, or of each expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def norm(self) -> Literal["rmsnorm", "layernorm"]:
        """Kind of normalisation."""
        return "layernorm" if self.family in _WITH_BIASES else "rmsnorm"

    @property
    def learned_positions(self) -> bool:
        """Whether positions are an embedding table instead of RoPE."""
        return self.family in _WITH_BIASES

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.family in ("qwen2", *_WITH_BIASES)

    @property
    def linear_bias(self) -> bool:
        """Whether the attention output and the MLP projections have a bias."""
        return self.family in _WITH_BIASES

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it maps a source to a target, each with a stack of its own."""
        return self.family in ENCODER_DECODER

    @property
    def position_offset(self) -> int:
        """Rows of a position table before the first position (transformers, BartLearnedPositionalEmbedding)."""
        return 2 if self.family == "bart" else 0

    def windowed(self, seq_length: int) -> bool:
        """Whether the sliding window cuts anything off sequences of this length."""
        return self.sliding_window is not None and self.sliding_window < seq_length
