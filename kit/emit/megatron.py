"""Plan → the arguments of megatron-core's classes, as plain values that the engine passes on.

    parallel_state               initialize_model_parallel
    transformer_config           TransformerConfig; dtypes and the activation by name
    model                        GPTModel, beyond its configuration and layer spec
    distributed_data_parallel    DistributedDataParallelConfig
    optimizer                    OptimizerConfig; ``lr`` is the peak, the training loop sets each step's own

kit writes only the values that it decides; others keep megatron-core's default. Read in megatron-core 0.16.1:
``parallel_state.py``, ``transformer/transformer_config.py``, ``model_parallel_config.py``,
``models/gpt/gpt_model.py``, ``distributed/distributed_data_parallel_config.py``, ``optimizer/optimizer_config.py``.
"""

from __future__ import annotations

from typing import Any

from kit.cost.hardware import generation_of
from kit.cost.model.pipeline import chunk_layers
from kit.emit.derived_file import DerivedFile, chosen
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.extra import merged
from kit.specs.job import BalancingSpec, JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.specs.validation import thawed

PLAN_OWNED_KEYS: dict[str, str] = {
    "parallel_state.tensor_model_parallel_size": "layout.tp",
    "parallel_state.pipeline_model_parallel_size": "layout.pp",
    "parallel_state.virtual_pipeline_model_parallel_size": "layout.vp",
    "parallel_state.context_parallel_size": "layout.cp",
    "parallel_state.expert_model_parallel_size": "layout.ep",
    "parallel_state.expert_tensor_parallel_size": "layout.etp",
    "transformer_config.tensor_model_parallel_size": "layout.tp",
    "transformer_config.pipeline_model_parallel_size": "layout.pp",
    "transformer_config.pipeline_model_parallel_layout": "layout.first_stage_layers",
    "transformer_config.virtual_pipeline_model_parallel_size": "layout.vp",
    "transformer_config.context_parallel_size": "layout.cp",
    "transformer_config.expert_model_parallel_size": "layout.ep",
    "transformer_config.expert_tensor_parallel_size": "layout.etp",
    "transformer_config.sequence_parallel": "layout.sp",
    "transformer_config.num_moe_experts": "model.num_experts",
    "transformer_config.moe_router_topk": "model.experts_per_token",
    "transformer_config.moe_ffn_hidden_size": "model.moe_ffn_hidden_size",
    "transformer_config.moe_shared_expert_intermediate_size": "model.num_shared_experts",
    "transformer_config.moe_shared_expert_gate": "model.family",
    "transformer_config.moe_layer_freq": "model.first_dense_layers",
    "transformer_config.moe_router_score_function": "model.family",
    "transformer_config.moe_router_enable_expert_bias": "model.family",
    "transformer_config.moe_router_load_balancing_type": "job.balancing",
    "transformer_config.moe_aux_loss_coeff": "job.balancing",
    "transformer_config.moe_z_loss_coeff": "job.balancing",
    "transformer_config.moe_router_bias_update_rate": "job.balancing",
    "transformer_config.moe_expert_capacity_factor": "job.balancing",
    "transformer_config.moe_grouped_gemm": "layout.implementation",
    "transformer_config.moe_permute_fusion": "layout.implementation",
    "transformer_config.moe_router_num_groups": "model.router_groups",
    "transformer_config.moe_router_group_topk": "model.router_top_groups",
    "transformer_config.moe_router_topk_scaling_factor": "model.routed_scaling_factor",
    "transformer_config.moe_router_pre_softmax": "model.norm_topk_prob",
    "transformer_config.num_layers": "model.num_layers",
    "transformer_config.mtp_num_layers": "job.mtp_num_layers",
    "transformer_config.mtp_loss_scaling_factor": "job.mtp_loss_scaling_factor",
    "transformer_config.hidden_size": "model.hidden_size",
    "transformer_config.ffn_hidden_size": "model.ffn_hidden_size",
    "transformer_config.num_attention_heads": "model.num_attention_heads",
    "transformer_config.num_query_groups": "model.num_key_value_heads",
    "transformer_config.kv_channels": "model.head_dim",
    "transformer_config.normalization": "model.family",
    "transformer_config.layernorm_epsilon": "model.norm_eps",
    "transformer_config.gated_linear_unit": "model.family",
    "transformer_config.activation_func": "model.family",
    "transformer_config.activation_func_clamp_value": "model.family",
    "transformer_config.glu_linear_offset": "model.family",
    "transformer_config.add_bias_linear": "model.family",
    "transformer_config.add_qkv_bias": "model.family",
    "transformer_config.qk_layernorm": "model.family",
    "transformer_config.no_rope_freq": "model.no_rope_every",
    "transformer_config.window_size": "model.sliding_window",
    "transformer_config.window_attn_skip_freq": "model.full_attention_every",
    "transformer_config.softmax_scale": "model.query_pre_attn_scalar",
    "transformer_config.layernorm_zero_centered_gamma": "model.family",
    "transformer_config.bf16": "job.precision",
    "transformer_config.params_dtype": "job.precision",
    "transformer_config.pipeline_dtype": "job.precision",
    "transformer_config.fp8": "job.precision",
    "model.vocab_size": "model.vocab_size",
    "model.max_sequence_length": "job.seq_length",
    "model.share_embeddings_and_output_weights": "model.tied_embeddings",
    "model.position_embedding_type": "model.family",
    "model.rotary_base": "model.rope_theta",
    "transformer_config.fp8_param": "layout.fp8_param_gather",
    "transformer_config.recompute_modules": "layout.recompute_modules",
    "distributed_data_parallel.use_distributed_optimizer": "layout.zero_stage",
    "distributed_data_parallel.grad_reduce_in_fp32": "layout.gradient_dtype",
    "distributed_data_parallel.fp8_param_gather": "layout.fp8_param_gather",
    "distributed_data_parallel.reuse_grad_buf_for_mxfp8_param_ag": "layout.fp8_param_gather",
    "optimizer.use_distributed_optimizer": "layout.zero_stage",
    "optimizer.optimizer_cpu_offload": "layout.offload_optimizer",
    "optimizer.optimizer_offload_fraction": "layout.optimizer_offload_fraction",
    "optimizer.overlap_cpu_optimizer_d2h_h2d": "layout.offload_optimizer",
    "optimizer.use_precision_aware_optimizer": "layout.optimizer_state_dtype",
    "optimizer.exp_avg_dtype": "layout.optimizer_state_dtype",
    "optimizer.exp_avg_sq_dtype": "layout.optimizer_state_dtype",
    "optimizer.main_grads_dtype": "layout.gradient_dtype",
    "optimizer.fp8_recipe": "layout.fp8_param_gather",
    "optimizer.reuse_grad_buf_for_mxfp8_param_ag": "layout.fp8_param_gather",
    "optimizer.bf16": "job.precision",
    "optimizer.params_dtype": "job.precision",
}
"""Dotted key → recipe key that decides it."""


def applies(plan: Plan) -> bool:
    """Whether a plan runs Megatron-core's model: on engine=megatron, or under DeepSpeed with Megatron's layers."""
    return plan.layout.implementation != "huggingface"


def megatron_settings(plan: Plan) -> dict[str, Any]:
    """Content of ``megatron.yaml``; see the module's docstring. Pure and deterministic.

    Under DeepSpeed the last two sections are left out, because DeepSpeed reduces gradients and steps the optimizer.
    """
    fp8, kept = _fp8(plan), plan.layout.fp8_param_gather
    shared = chosen(("reuse_grad_buf_for_mxfp8_param_ag", kept and fp8["fp8_recipe"] == "mxfp8", True))
    settings = {
        "parallel_state": _parallel_state(plan.model, plan.layout),
        "transformer_config": _transformer_config(plan.model, plan.job, plan.layout)
        | fp8
        | chosen(("fp8_param", kept, True)),
        "model": _model(plan.model, plan.job, plan.layout),
    }
    if plan.layout.engine != "deepspeed":
        settings |= {
            "distributed_data_parallel": {
                "grad_reduce_in_fp32": plan.layout.gradient_dtype == "fp32",
                "overlap_grad_reduce": overlaps_gradients(plan.layout),
                "use_distributed_optimizer": shards_optimizer(plan.layout),
                **chosen(("fp8_param_gather", kept, True)),
                **shared,
            },
            "optimizer": _optimizer(plan.job, plan.layout)
            | chosen(("fp8_recipe", kept, fp8.get("fp8_recipe")))
            | shared,
        }
    return merged(settings, thawed(plan.extra.megatron))


def _fp8(plan: Plan) -> dict[str, Any]:
    """Transformer Engine's fp8 recipe (transformer_config.py, fp8_recipe). Blackwell's tensor cores scale blocks of 32
    values. Older GPUs use one scale per tensor, computed from the current tensor and not from past steps (delayed)."""
    if plan.job.precision != "fp8":
        return {}
    if generation_of(plan.cluster.gpu) == "blackwell":
        return {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
    return {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


def shards_optimizer(layout: Layout) -> bool:
    """Whether Megatron's distributed optimizer is used: with several data-parallel ranks, or with the optimizer on the
    host, which is a distributed one."""
    return layout.zero_stage == 1 and (layout.dense_dp > 1 or layout.offload_optimizer != "none")


def overlaps_gradients(layout: Layout) -> bool:
    """Whether gradient reduction overlaps backward: always with several data-parallel ranks. Weights are gathered right
    after the step (no overlap_param_gather), because checkpoints and exports read them between steps."""
    return layout.dense_dp > 1


def padded_vocab_size(model: ModelSpec, layout: Layout) -> int:
    """Rows of the embedding: the next multiple of tp. The engine masks the padding, so it does not change the loss."""
    return -(-model.vocab_size // layout.tp) * layout.tp


def _parallel_state(model: ModelSpec, layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        **chosen(("virtual_pipeline_model_parallel_size", layout.vp > 1, layout.vp)),
        **(_expert_parallel(layout) if model.num_experts else {}),
    }


def _expert_parallel(layout: Layout) -> dict[str, Any]:
    return {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.etp}


def _experts(model: ModelSpec, balancing: BalancingSpec, layout: Layout) -> dict[str, Any]:
    """Settings of the router, equal to transformers' routing, and of expert balancing."""
    kind = balancing.moe_router_load_balancing_type
    # moe/router.py computes this loss over all data-parallel ranks, and the gradients are then averaged over them
    # again.
    coefficient = balancing.moe_aux_loss_coeff * (layout.dp if kind == "global_aux_loss" else 1)
    settings: dict[str, Any] = {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        # The softmax of the chosen logits equals the renormalised softmax of all logits.
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_load_balancing_type": kind,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }
    if model.traits.router == "sigmoid":
        settings |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": balancing.moe_router_bias_update_rate,
        }
    settings |= chosen(
        ("moe_aux_loss_coeff", coefficient, coefficient),
        ("moe_z_loss_coeff", balancing.moe_z_loss_coeff, balancing.moe_z_loss_coeff),
        (
            "moe_expert_capacity_factor",
            balancing.moe_expert_capacity_factor is not None,
            balancing.moe_expert_capacity_factor,
        ),
        ("moe_router_num_groups", model.router_groups > 1, model.router_groups),
        ("moe_router_group_topk", model.router_groups > 1, model.router_top_groups),
        ("moe_router_topk_scaling_factor", model.routed_scaling_factor != 1, model.routed_scaling_factor),
        (
            "moe_shared_expert_intermediate_size",
            model.num_shared_experts,
            model.shared_ffn_hidden_size,
        ),
        ("moe_shared_expert_gate", model.traits.shared_expert_gate, True),
        # Transformer Engine multiplies all experts of a rank by one call, and permutes tokens by one kernel.
        ("moe_grouped_gemm", layout.implementation == "transformer_engine", True),
        ("moe_permute_fusion", layout.implementation == "transformer_engine", True),
        (
            "moe_layer_freq",
            model.first_dense_layers,
            [int(model.has_experts(layer)) for layer in range(model.num_layers)],
        ),
    )
    return settings | _expert_parallel(layout)


def _transformer_config(model: ModelSpec, job: JobSpec, layout: Layout) -> dict[str, Any]:
    dtype = _dtype(job)
    settings: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[model.norm],
        "layernorm_epsilon": model.norm_eps,
        "activation_func": model.traits.activation,
        "gated_linear_unit": model.gated_mlp,
        "add_bias_linear": model.linear_bias,
        "add_qkv_bias": model.qkv_bias,
        # A norm over the whole width is split like the heads, but megatron-core would all-reduce its gradient.
        "qk_layernorm": model.traits.qk_norm == "head",
        # Pretraining reads each token about once: no dropout, in any engine.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Transformer Engine adds weight gradients to the gradient buffer; without it apex's kernel would be needed.
        "gradient_accumulation_fusion": layout.implementation == "transformer_engine",
        # Gradients are those of the mean over all tokens of the step, for every layout (kit/engines/protocol.py).
        "calculate_per_token_loss": True,
        "bf16": job.precision in ("bf16", "fp8"),
        "params_dtype": dtype,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sp,
        **(_experts(model, job.balancing or BalancingSpec(), layout) if model.num_experts else {}),
    }
    windowed = model.sliding_window is not None and model.windowed(job.seq_length)
    clamped, scalar = model.traits.activation == "clamped_swiglu", model.query_pre_attn_scalar
    recomputes_all = layout.recompute == "full"
    return settings | chosen(
        ("no_rope_freq", model.no_rope_every, [int(not model.rotates(layer)) for layer in range(model.num_layers)]),
        ("window_size", windowed, [(model.sliding_window or 0) - 1, 0]),  # the token itself is not counted
        ("mtp_num_layers", job.mtp_num_layers, job.mtp_num_layers),
        ("mtp_loss_scaling_factor", job.mtp_num_layers, job.mtp_loss_scaling_factor),
        ("window_attn_skip_freq", windowed and model.full_attention_every, model.full_attention_every),
        ("activation_func_clamp_value", clamped, 7.0),
        ("glu_linear_offset", clamped, 1.0),
        ("layernorm_zero_centered_gamma", model.traits.zero_centred_norm, True),
        ("softmax_scale", scalar is not None, (scalar or 1.0) ** -0.5),
        ("cp_comm_type", layout.cp > 1, layout.cp_comm_type),
        ("pipeline_dtype", layout.pp > 1, dtype),
        # Frees the outputs that a stage has sent. Not with overlapped sends: gloo still reads the tensor, and the
        # losses would silently be wrong.
        ("deallocate_pipeline_outputs", layout.pp > 1 and layout.vp == 1, True),
        # With batched sends (the default), two interleaved stages silently compute wrong losses: each pair of ranks
        # exchanges two messages at a time, and the messages are mixed up.
        ("virtual_pipeline_model_parallel_size", layout.vp > 1, layout.vp),
        ("overlap_p2p_comm", layout.vp > 1, True),
        ("batch_p2p_comm", layout.vp > 1, False),
        (
            "pipeline_model_parallel_layout",
            layout.first_stage_layers or layout.last_stage_layers,
            _stages(model, layout),
        ),
        ("recompute_granularity", layout.recompute in ("full", "selective"), layout.recompute),
        ("recompute_method", recomputes_all, "uniform"),
        ("recompute_num_layers", recomputes_all, 1),
        ("recompute_modules", layout.recompute == "selective", [*layout.recompute_modules] or ["core_attn"]),
    )


def _stages(model: ModelSpec, layout: Layout) -> str:
    """Embedding, transformer layers and loss, chunk by chunk (transformer/pipeline_parallel_layer_layout.py)."""
    chunks = ["t" if len(chunk) == 1 else f"t*{len(chunk)}" for chunk in chunk_layers(model.num_layers, layout)]
    chunks = ["" if chunk == "t*0" else chunk for chunk in chunks]
    return f"E{'|'.join(chunks)}{'m' * model.mtp_num_layers}L"


def _model(model: ModelSpec, job: JobSpec, layout: Layout) -> dict[str, Any]:
    return {
        "vocab_size": padded_vocab_size(model, layout),
        "max_sequence_length": model.max_position_embeddings if model.learned_positions else job.seq_length,
        "share_embeddings_and_output_weights": model.tied_embeddings,
        "position_embedding_type": "learned_absolute" if model.learned_positions else "rope",
    }


def _optimizer(job: JobSpec, layout: Layout) -> dict[str, Any]:
    adam = {"adam_beta1": job.optimizer.beta1, "adam_beta2": job.optimizer.beta2, "adam_eps": job.optimizer.eps}
    kinds: dict[str, dict[str, Any]] = {
        "adamw": adam,
        "sgd": {"sgd_momentum": job.optimizer.beta1},
        "muon": {**adam, **_muon(job)},
    }
    on_host = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": layout.optimizer_offload_fraction,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,  # whose code the offload reuses
    }
    short_state = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    return {
        "optimizer": "adam" if job.optimizer.name == "adamw" else job.optimizer.name,
        "lr": job.learning_rate,
        **kinds[job.optimizer.name],
        "weight_decay": job.optimizer.weight_decay,
        "clip_grad": job.grad_clip,
        "bf16": job.precision in ("bf16", "fp8"),
        "params_dtype": _dtype(job),
        "use_distributed_optimizer": shards_optimizer(layout),
        **(on_host if layout.offload_optimizer == "cpu" else {}),
        **(short_state if layout.optimizer_state_dtype == "bf16" else {}),
        **({"main_grads_dtype": "bf16"} if layout.optimizer_state_dtype == layout.gradient_dtype == "bf16" else {}),
    }


def _muon(job: JobSpec) -> dict[str, Any]:
    """torch.optim.Muon's values and AdamW's update size (arXiv 2502.16982), on whole matrices. Read in megatron-core
    0.19.2."""
    return {
        "muon_momentum": 0.95,
        "muon_nesterov": True,
        "muon_coefficient_type": "simple",
        "muon_scale_mode": "spectral",
        "muon_extra_scale_factor": 0.2,
        "muon_fp32_matmul_prec": "highest" if job.precision == "fp32" else "medium",
        "muon_tp_mode": "duplicated",
    }


def _dtype(job: JobSpec) -> str:
    """Data type of parameters and activations: bf16 for fp8, which is a precision of GEMMs only."""
    return {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}[job.precision]


FILES = (
    DerivedFile(
        "megatron.yaml",
        lambda plan: strict_yaml.dump(megatron_settings(plan)),
        applies,
        PLAN_OWNED_KEYS,
    ),
)
