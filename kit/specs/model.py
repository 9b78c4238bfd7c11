"""The shape of a transformer: all that planning needs to know about a model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kit.errors import SpecError
from kit.specs.base import SPEC

Family = Literal["llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe"]

WINDOWED: tuple[Family, ...] = ("mistral", "phi3", "mixtral")
"""Families whose attention may have a sliding window."""
WITH_EXPERTS: tuple[Family, ...] = ("mixtral", "qwen3_moe")
"""Families whose MLPs are mixtures of experts, in every layer."""


@dataclass(frozen=True, kw_only=True, config=SPEC)
class ModelSpec:
    """A decoder-only transformer. Sizes are per model, never per rank."""

    name: str
    """Catalog name, hub id, or the directory name of a local model."""
    family: Family
    """Decides which biases and norms exist, and which Hugging Face class builds it."""
    num_layers: int = Field(gt=0)
    """Transformer layers."""
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
        return self.family != "gpt2"

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP that a layer really has: of the one, or of each expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def norm(self) -> Literal["rmsnorm", "layernorm"]:
        """Kind of normalisation."""
        return "layernorm" if self.family == "gpt2" else "rmsnorm"

    @property
    def learned_positions(self) -> bool:
        """Whether positions are an embedding table instead of RoPE."""
        return self.family == "gpt2"

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.family in ("qwen2", "gpt2")

    @property
    def linear_bias(self) -> bool:
        """Whether the attention output and the MLP projections have a bias."""
        return self.family == "gpt2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.family in ("qwen3", "qwen3_moe")

    def windowed(self, seq_length: int) -> bool:
        """Whether the sliding window cuts anything off sequences of this length."""
        return self.sliding_window is not None and self.sliding_window < seq_length
