"""Traits of model families: norms, biases, positions, activations, and optional sizes.

One row per family, with transformers' name (``model_type``); read in its ``modeling_*.py`` (transformers 5.23).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "seed_oss",
    "smollm3",
    "granite",
    "ministral3",
    "olmo2",
    "olmo3",
    "starcoder2",
    "gpt2",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "t5",
    "bart",
    "blenderbot",
    "transformers",
]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["input", "output", "both", "sum"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]
Biases = Literal["none", "qkv", "all"]
QKNorm = Literal["none", "head", "width"]
Positions = Literal["rope", "learned", "alibi", "relative"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a family's models have in common, or one model's choice where its family leaves one."""

    norm: Norm = "rmsnorm"
    norm_placement: NormPlacement = "input"
    """Where attention and MLP have their norm: before, after (inside the residual branch), on both sides, or on the sum
    with the residual stream; there is no norm at the end then."""
    zero_centred_norm: bool = False
    """Whether a norm scales by 1 + weight."""
    activation: Activation = "silu"
    """``gelu_tanh`` is the approximation. ``clamped_swiglu``: clamp(gate)·σ(1.702·clamp(gate))·(clamp(up) + 1)."""
    gated_mlp: bool = True
    """Three matrices instead of two."""
    biases: Biases = "none"
    """qkv: of query, key and value. all: of the attention's output, the MLP (each expert) and the router too."""
    qk_norm: QKNorm = "none"
    """Whether queries and keys are normalised: each head, or all heads together."""
    positions: Positions = "rope"
    position_offset: int = 0
    """Rows of a learned position table that no position uses."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    embedding_norm: bool = False
    """Whether embeddings are normalised before the first layer."""
    attention_sinks: bool = False
    """Whether each head has a learned score that takes part in the softmax and adds nothing."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts. sigmoid: with a correction that chooses experts and does not weigh them; no parameter."""
    shared_expert_gate: bool = False
    """Whether each token has a learned weight, a sigmoid, of what the shared experts compute."""
    adapted_mlps: bool = True
    """Whether MLPs outside of routed experts get adapters. False where peft takes their names for those of the experts
    that transformers 5 fuses (peft/utils/transformers_weight_conversion.py), and would adapt these."""
    balancing: Mapping[str, Any] = field(default_factory=dict)
    """How its experts were balanced in pretraining, as published: fields of BalancingSpec. Empty: nobody said."""
    fused_attention: bool = True
    """Whether transformers has it by torch's scaled_dot_product_attention; otherwise scores are materialised."""
    even_heads: bool = False
    """Whether heads split the hidden size, so that head_dim is no choice."""
    grouped_queries: bool = True
    """Whether there may be fewer key/value heads than query heads."""
    needs: tuple[str, ...] = ()
    """Optional fields of ModelSpec that the family cannot do without."""
    takes: tuple[str, ...] = ()
    """Optional fields of ModelSpec that it may have beside these."""
    megatron: str = ""
    """Weight map for the Megatron engine, of ``kit/engines/megatron/weights``: ``file.TABLE``, what a layer has in the
    map of Llama; or ``file.function``, which returns a whole map. Empty: none."""
    transformer_engine: bool = False
    """Whether Megatron-core's own layer specs compute it, which Transformer Engine and pretrain_gpt.py need. The other
    Megatron families differ inside a layer (``kit/engines/megatron/model``)."""
    autotp: bool = False
    """Whether DeepSpeed's AutoTP splits it: it refuses the fused projections of Phi-3 and of experts
    (module_inject/tp_plan_converter.py) and GPT-2's transposed ones (module_inject/auto_tp.py)."""
    torch_tensor_parallel: bool = False
    """Whether its plan in transformers splits linear layers by columns and rows, and nothing else."""
    ulysses: bool = True
    """Whether its configuration has num_key_value_heads, which DeepSpeed-Ulysses reads."""
    packed_attention: bool = False
    """Whether transformers' attention for sequences of variable length (cu_seqlens) was tried with it."""
    interleaved_experts: bool = False
    """Whether a checkpoint stores the gates of all experts interleaved with their up projections, in one tensor."""
    conv1d: bool = False
    """Whether transformers has its linear layers as Conv1D, whose weights are transposed (GPT-2: two of a layer are
    called c_proj)."""
    fused_qkv: bool = False
    """Whether query, key and value are one matrix in transformers."""
    fused_gate_up: bool = False
    """Whether gate and up are one matrix in transformers."""
    broadcasts_keys: bool = False
    """Whether transformers hands attention one key for all heads, or copies of it (modeling_falcon.py)."""
    norm_scaled_in_fp32: bool = False
    """Whether an RMSNorm multiplies by its scale before it casts to the model's dtype."""
    norm_scales_input: bool = False
    """Whether an RMSNorm multiplies its input itself, and not an fp32 copy (modeling_t5.py)."""
    eager_gelu: bool = False
    """Whether its GELU is written in torch's operators (gelu_new: seven of them)."""
    ties_always: bool = False
    """Whether transformers' class ties the embeddings whatever it is given."""
    mlp_names: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")
    """Names on disk: a layer's MLP, and the gate, up and down matrix of each expert in it."""
    prefix: str = "model."
    """Prefix of the names of all parameters but the head's, on disk."""
    head_name: str = "lm_head.weight"
    """The output projection, on disk."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Traits of this table that a model of the family may have otherwise, with the values known."""


_EXPERTS = ("num_experts", "experts_per_token", "moe_ffn_hidden_size")
_ROUTER = (
    "first_dense_layers",
    "router_groups",
    "router_top_groups",
    "routed_scaling_factor",
    "norm_topk_prob",
    "num_shared_experts",
)
_ROPE = ("rope_scaling",)
_LLAMA = Traits(megatron="llama.LAYER", transformer_engine=True, autotp=True, packed_attention=True)
_GEMMA = Traits(
    activation="gelu_tanh", zero_centred_norm=True, norm_scaled_in_fp32=True, scaled_embedding=True, takes=_ROPE
)
_OLMO = Traits(
    megatron="olmo.OLMO",
    norm_placement="output",
    norm_scaled_in_fp32=True,
    qk_norm="width",
    even_heads=True,
    takes=_ROPE,
)
_CAPS = ("attention_softcap", "logit_softcap")
_CLASSIC = Traits(
    norm="layernorm",
    gated_mlp=False,
    biases="all",
    activation="gelu_tanh",
    even_heads=True,
    grouped_queries=False,
)


def _like(base: Traits, **changes: Any) -> Traits:
    return dataclasses.replace(base, **changes)


_TWO_STACKS = _like(
    _CLASSIC, activation="gelu", positions="learned", needs=("encoder_layers",), takes=("scale_embedding",)
)

FAMILIES: Mapping[Family, Traits] = {
    "llama": _like(_LLAMA, torch_tensor_parallel=True, takes=_ROPE),
    "mistral": _like(_LLAMA, torch_tensor_parallel=True, takes=(*_ROPE, "sliding_window")),
    "qwen2": _like(_LLAMA, megatron="llama.QWEN2", torch_tensor_parallel=True, biases="qkv", takes=_ROPE),
    "qwen3": _like(_LLAMA, megatron="llama.QWEN3", qk_norm="head", takes=_ROPE),
    "gemma": _GEMMA,
    "gemma2": _like(
        _GEMMA,
        megatron="gemma.GEMMA2",
        norm_placement="both",
        fused_attention=False,
        needs=("sliding_window", "query_pre_attn_scalar"),
        takes=(*_ROPE, "full_attention_every", *_CAPS),
    ),
    "gemma3_text": _like(
        _GEMMA,
        megatron="gemma.GEMMA3",
        norm_placement="both",
        qk_norm="head",
        needs=("sliding_window", "query_pre_attn_scalar"),
        takes=(*_ROPE, "full_attention_every", *_CAPS, "local_rope_theta"),
    ),
    "phi3": _like(
        _LLAMA,
        megatron="llama.phi3",
        autotp=False,
        even_heads=True,
        fused_qkv=True,
        fused_gate_up=True,
        takes=(*_ROPE, "sliding_window", "partial_rotary_factor"),
    ),
    "seed_oss": Traits(megatron="llama.QWEN2", transformer_engine=True, biases="qkv", takes=_ROPE),
    "smollm3": Traits(megatron="llama.LAYER", even_heads=True, takes=("no_rope_every",)),
    "granite": Traits(
        megatron="llama.LAYER",
        even_heads=True,
        needs=("query_pre_attn_scalar",),
        takes=(*_ROPE, "embedding_multiplier", "residual_multiplier", "logits_divisor"),
    ),
    "ministral3": Traits(megatron="llama.LAYER", needs=_ROPE, takes=("sliding_window",)),
    "olmo2": _OLMO,
    "olmo3": _like(_OLMO, needs=("sliding_window", "local_rope_theta"), takes=(*_ROPE, "full_attention_every")),
    "starcoder2": _like(_CLASSIC, grouped_queries=True, takes=(*_ROPE, "sliding_window")),
    "gpt2": _like(
        _CLASSIC,
        positions="learned",
        conv1d=True,
        fused_qkv=True,
        eager_gelu=True,
        prefix="transformer.",
        ulysses=False,
        megatron="gpt2.gpt2",
        transformer_engine=True,
    ),
    "gpt_neox": _like(
        _CLASSIC,
        megatron="gpt_neox.gpt_neox",
        activation="gelu",
        fused_qkv=True,
        prefix="gpt_neox.",
        head_name="embed_out.weight",
        takes=(*_ROPE, "partial_rotary_factor", "parallel_residual"),
        choices={"activation": ("gelu", "gelu_tanh")},
    ),
    "opt": _like(_CLASSIC, activation="relu", positions="learned", position_offset=2),
    "bloom": _like(_CLASSIC, positions="alibi", embedding_norm=True, fused_attention=False, fused_qkv=True),
    "falcon": _like(
        _CLASSIC,
        activation="gelu",
        biases="none",
        grouped_queries=True,
        fused_qkv=True,
        broadcasts_keys=True,
        takes=(*_ROPE, "parallel_residual", "shared_norm"),
        choices={"biases": ("none", "all"), "positions": ("rope", "alibi")},
    ),
    "mixtral": Traits(
        megatron="llama.MIXTRAL",
        transformer_engine=True,
        mlp_names=("block_sparse_moe", "w1", "w3", "w2"),
        balancing={
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.02,
            "source": "config.json of mistralai/Mixtral-8x7B-v0.1, router_aux_loss_coef",
        },
        needs=_EXPERTS,
        takes=(*_ROPE, "sliding_window"),
    ),
    "qwen2_moe": Traits(
        megatron="qwen2_moe.QWEN2_MOE",
        biases="qkv",
        shared_expert_gate=True,
        even_heads=True,
        balancing={
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.001,
            "source": "router_aux_loss_coef of Qwen2MoeConfig, transformers 5.23",
        },
        needs=(*_EXPERTS, "num_shared_experts"),
        takes=(*_ROPE, "norm_topk_prob"),
    ),
    "qwen3_moe": Traits(
        megatron="llama.QWEN3_MOE",
        transformer_engine=True,
        qk_norm="head",
        balancing={
            "moe_router_load_balancing_type": "global_aux_loss",
            "moe_aux_loss_coeff": 0.001,
            "source": "arXiv 2505.09388, section 2; config.json of Qwen/Qwen3-235B-A22B, router_aux_loss_coef",
        },
        needs=_EXPERTS,
        takes=(*_ROPE, "norm_topk_prob"),
    ),
    "deepseek_v2": Traits(
        adapted_mlps=False,
        # kit does not compute its device-level and communication balance losses.
        balancing={
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.003,
            "source": "arXiv 2405.04434, section 3.1.2, alpha_1",
        },
        needs=("latent", *_EXPERTS),
        takes=(*_ROPE, *_ROUTER),
    ),
    "deepseek_v3": Traits(
        megatron="deepseek.deepseek_v3",
        adapted_mlps=False,
        router="sigmoid",
        # The bias update rate was 0 for the last 500 billion of 14.8 trillion tokens.
        balancing={
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.0001,
            "moe_router_bias_update_rate": 0.001,
            "source": "arXiv 2412.19437, section 4.2, alpha and gamma",
        },
        needs=("latent", *_EXPERTS),
        takes=(*_ROPE, *_ROUTER, "mtp_num_layers"),
    ),
    "glm4_moe": Traits(
        megatron="deepseek.glm4_moe",
        adapted_mlps=False,
        router="sigmoid",
        needs=_EXPERTS,
        takes=(*_ROPE, *_ROUTER, "partial_rotary_factor", "mtp_num_layers"),
        choices={"biases": ("none", "qkv"), "qk_norm": ("none", "head")},
    ),
    "minimax_m2": Traits(
        megatron="minimax_m2.MINIMAX_M2",
        router="sigmoid",
        qk_norm="width",
        mlp_names=("block_sparse_moe", "w1", "w3", "w2"),
        needs=_EXPERTS,
        takes=(*_ROPE, "partial_rotary_factor"),
    ),
    "gpt_oss": Traits(
        interleaved_experts=True,
        megatron="gpt_oss.GPT_OSS",
        activation="clamped_swiglu",
        biases="all",
        attention_sinks=True,
        fused_attention=False,
        norm_scaled_in_fp32=True,
        needs=(*_EXPERTS, "sliding_window"),
        takes=(*_ROPE, "full_attention_every"),
    ),
    # Two stacks. T5 1.1 has a gated MLP (feed_forward_proj).
    "t5": Traits(
        positions="relative",
        norm_scales_input=True,
        eager_gelu=True,
        ties_always=True,
        prefix="",
        activation="relu",
        gated_mlp=False,
        grouped_queries=False,
        needs=("encoder_layers", "relative_attention_buckets", "feed_forward_proj"),
        takes=("relative_attention_max_distance",),
    ),
    "bart": _like(_TWO_STACKS, norm_placement="sum", embedding_norm=True, position_offset=2),
    "blenderbot": _TWO_STACKS,
}


def families_where(trait: str) -> tuple[Family, ...]:
    """Families for which the boolean trait is true."""
    return tuple(family for family, traits in FAMILIES.items() if getattr(traits, trait))


def families_with(optional: str) -> tuple[Family, ...]:
    """Families that may have the optional field of ModelSpec, or whose models may choose the trait."""
    return tuple(
        family
        for family, traits in FAMILIES.items()
        if optional in traits.needs or optional in traits.takes or optional in traits.choices
    )


ENCODER_DECODER: tuple[Family, ...] = families_with("encoder_layers")
"""Families of two stacks: an encoder reads the source, a decoder writes the target and attends to the encoder."""
