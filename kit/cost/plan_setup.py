"""A plan's model, job and layout as a setup and a program of the cost model."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kit.cost.adapters import adapter_parameters_of
from kit.cost.compression import ZeroPlusPlus, gradient_bytes, kernel_bytes
from kit.cost.machine import ComputePrecision
from kit.cost.params import stage_parameters
from kit.cost.pipeline import chunk_layers
from kit.cost.program import Code, Program
from kit.cost.setup import Experts, Fp8, LatentAttention, Lora, Shape, TrainingSetup
from kit.cost.states import MOMENTS
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec

_SHARDING = {0: "none", 1: "optimizer", 2: "gradients", 3: "full"}


@lru_cache(maxsize=64)
def shape_of(model: ModelSpec) -> Shape:
    """The shape without padding of the vocabulary."""
    experts = None
    if model.num_experts:
        experts = Experts(
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            ffn_hidden_size=model.moe_ffn_hidden_size,
            shared_ffn_hidden_size=model.num_shared_experts * model.moe_ffn_hidden_size,
        )
    latent = None
    if model.latent:
        latent = LatentAttention(
            q_lora_rank=model.latent.q_lora_rank,
            kv_lora_rank=model.latent.kv_lora_rank,
            nope_head_dim=model.latent.nope_head_dim,
            rope_head_dim=model.latent.rope_head_dim,
            value_head_dim=model.latent.value_head_dim,
        )
    return Shape(
        num_layers=model.num_layers + model.encoder_layers,
        cross_attention_layers=model.num_layers if model.is_encoder_decoder else 0,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        gated_mlp=model.gated_mlp,
        tied_embeddings=model.tied_embeddings,
        norm=model.norm,
        norms_per_layer=4 if model.traits.norm_placement == "both" else 2,
        zero_centred_norm=model.traits.zero_centred_norm,
        learned_positions=model.max_position_embeddings if model.learned_positions else 0,
        linear_bias=model.linear_bias,
        qkv_bias=model.qkv_bias,
        qk_norm=model.qk_norm,
        latent=latent,
        experts=experts,
        expert_layers=tuple(layer >= model.first_dense_layers for layer in range(model.num_layers)) if experts else (),
        # Layers that see everything decide the slowest kernel; with a window on most, few of them do.
        sliding_window=model.sliding_window if model.full_attention_every == 0 else None,
    )


def compute_precision(job: JobSpec) -> ComputePrecision:
    """What matrix products run in."""
    return job.precision


def program_of(model: ModelSpec, job: JobSpec, layout: Layout) -> Program:
    """How this kit's engines run a layout (kit/emit, kit/engines)."""
    megatron = layout.implementation != "huggingface"
    fused = layout.implementation == "transformer_engine"
    width = 2.0 if layout.engine == "deepspeed" and job.precision != "fp32" else 4.0
    unfused: Code = "compiled" if layout.compile_layers else "huggingface"
    engine = layout.engine if layout.engine != "torch" else "ddp" if layout.zero_stage == 0 else "fsdp"
    return Program(
        engine=engine,
        code="fused" if fused else "local" if megatron else unfused,
        precision=compute_precision(job),
        linear_layers_only=job.precision == "fp8" and not megatron,
        attention="cudnn" if fused or layout.attention_kernel == "cudnn" else "flash",
        overlaps_gradients=not (layout.engine == "megatron" and layout.vp == 1 and layout.pp > 1),
        # LinearWithGradAccumulationAndAsyncCommunication runs for both of Megatron's implementations; DTensor waits for
        # each of its collectives.
        overlaps_tensor_gradients=layout.engine != "torch",
        context_exchange=layout.cp_comm_type,
        gradient_bytes=gradient_bytes(model, layout.gradient_compression, width),
        gradient_kernel_bytes=kernel_bytes(layout.gradient_compression),
        zero_plus_plus=ZeroPlusPlus.of(layout),
        moment_bytes=MOMENTS[job.optimizer.name].rest,
    )


def split_fields(num_layers: int, job: JobSpec, layout: Layout) -> dict[str, Any]:
    """What times and memory read alike: the fields of ``TrainingSetup`` that say how ranks divide the work."""
    uneven = layout.first_stage_layers is not None or layout.last_stage_layers is not None
    return {
        "seq_length": job.seq_length,
        "micro_batch_size": layout.micro_batch_size,
        "micro_batches": layout.gradient_accumulation_steps,
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "vp": layout.vp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "sp": layout.sp,
        "stage_layers": chunk_layers(num_layers, layout) if uneven else (),
        "recompute": layout.recompute,
        "gradient_accumulation_fusion": layout.implementation == "transformer_engine",
        "fp8": Fp8() if job.precision == "fp8" else None,
    }


def setup_of(model: ModelSpec, job: JobSpec, layout: Layout) -> TrainingSetup:
    """The rank's share of the work, for times."""
    shape = shape_of(model)
    return TrainingSetup(
        shape=shape,
        **split_fields(shape.num_layers, job, layout),
        kernels="huggingface" if layout.implementation == "huggingface" else "transformer_engine",
        attention="flash",
        adapters=adapter_parameters_of(model, job.lora) / layout.tp if job.lora else None,
        parameters=stage_parameters(model, layout),
        sharding=_SHARDING[layout.zero_stage],  # type: ignore[arg-type]
        recompute_modules=frozenset({"core_attn"}) if layout.recompute == "selective" else frozenset(),
        weight_bytes=4 if layout.engine == "torch" else 2,
        chunked_loss=layout.chunked_loss,
        liger_loss=layout.loss_kernel == "liger",
        compiled_loss=layout.chunked_loss and layout.compile_layers,
        lora=Lora(rank=job.lora.rank, targets=frozenset({"query"}), four_bit=job.lora.four_bit) if job.lora else None,
    )
