"""The one description of a candidate plan: what is trained, on what, and how the ranks split the work.

Memory, time, reliability and the planner's rules are functions of it. It is frozen and has a hash, so that what is
worked out for it can be kept. ``setup`` is the same in the terms of the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from kit.cost.hardware import generation_of
from kit.cost.model.compression import ZeroPlusPlus, gradient_bytes, kernel_bytes
from kit.cost.model.lora import adapter_parameters_of
from kit.cost.model.optimizers import MOMENTS
from kit.cost.model.params import dense_layer_matrices, stage_parameters
from kit.cost.model.pipeline import chunk_layers
from kit.cost.setup import Attention, Code, Experts, Fp8, LatentAttention, Lora, Program, Shape, TrainingSetup
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec

_SHARDING = {0: "none", 1: "optimizer", 2: "gradients", 3: "full"}
_TARGETS = {
    "attention": frozenset({"query", "key", "value", "projection"}),
    "all-linear": frozenset({"query", "key", "value", "projection", "mlp"}),
}


@dataclass(frozen=True)
class Workload:
    """One candidate plan."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    layout: Layout

    @cached_property
    def _hash(self) -> int:
        return hash((self.model, self.cluster, self.job, self.layout))

    def __hash__(self) -> int:
        return self._hash

    def with_layout(self, layout: Layout) -> Workload:
        """Replaces the layout; the work stays the same."""
        return Workload(self.model, self.cluster, self.job, layout)

    @cached_property
    def with_least_micro_batches(self) -> Workload:
        """The same with micro batches of one sequence, and with two of them in a step where there are more."""
        steps = min(2, self.layout.gradient_accumulation_steps)
        return self.with_layout(replace(self.layout, micro_batch_size=1, gradient_accumulation_steps=steps))

    @cached_property
    def generation(self) -> str:
        """Generation of the GPU."""
        return generation_of(self.cluster.gpu)

    @cached_property
    def autocast(self) -> bool:
        """Whether fp32 parameters are cast by every product: the torch engine, except where FSDP2 gathers them in bf16,
        and DeepSpeed on request."""
        layout = self.layout
        return layout.autocast or (self.job.precision != "fp32" and layout.engine == "torch" and layout.zero_stage == 0)

    @cached_property
    def attention(self) -> Attention:
        """Kernel of attention. Torch has none of capped scores (kit/engines/megatron/model/attention.py). Transformer
        Engine prefers cuDNN's on Hopper and later, flash-attn before (dot_product_attention/utils.py,
        get_attention_backend)."""
        if self.layout.implementation == "local" and self.model.attention_softcap is not None:
            return "unfused"
        if self.layout.implementation == "transformer_engine":
            return "cudnn" if self.generation in ("hopper", "blackwell") else "flash"
        return "cudnn" if self.layout.attention_kernel == "cudnn" else "flash"

    @cached_property
    def setup(self) -> TrainingSetup:
        """This workload in the terms of the memory and time formulas."""
        model, job, layout = self.model, self.job, self.layout
        uneven = layout.first_stage_layers is not None or layout.last_stage_layers is not None
        fp32 = job.precision == "fp32"
        return TrainingSetup(
            shape=shape_of(model),
            program=_program_of(self),
            kernels=layout.implementation,
            attention=self.attention,
            seq_length=job.seq_length,
            micro_batch_size=layout.micro_batch_size,
            micro_batches=layout.gradient_accumulation_steps,
            dp=layout.dp,
            tp=layout.tp,
            pp=layout.pp,
            vp=layout.vp,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.etp,
            sp=layout.sp,
            sharding=_SHARDING[layout.zero_stage],  # type: ignore[arg-type]
            stage_layers=chunk_layers(model.num_layers, layout) if uneven else (),
            recompute=layout.recompute,
            recompute_modules=frozenset({"core_attn"}) if layout.recompute == "selective" else frozenset(),
            weight_bytes=4 if fp32 or layout.engine == "torch" else 2,
            # Interleaved sends are still read when they would be freed (kit/emit/megatron.py).
            keeps_outputs=layout.pp > 1 and layout.vp > 1,
            gradient_accumulation_fusion=layout.implementation == "transformer_engine",
            fp8=Fp8() if job.precision == "fp8" else None,
            lora=_lora(job.lora),
            gpu_generation=self.generation,
            element=4 if fp32 else 2,
            autocast=self.autocast,
            exchange=layout.cp_comm_type,
            chunked_loss=layout.chunked_loss,
            liger_loss=layout.loss_kernel == "liger",
            compiled_loss=layout.chunked_loss and layout.compile_layers,
            compiled_layers=layout.compile_layers,
            parameters=stage_parameters(model, layout),
            dense_layer_matrices=dense_layer_matrices(model, layout),
            adapters=adapter_parameters_of(model, job.lora) / layout.tp if job.lora else None,
        )


def _program_of(workload: Workload) -> Program:
    """How this kit's engines run a layout (kit/emit, kit/engines)."""
    model, job, layout = workload.model, workload.job, workload.layout
    megatron = layout.implementation != "huggingface"
    fused = layout.implementation == "transformer_engine"
    width = 2.0 if layout.engine == "deepspeed" and job.precision != "fp32" else 4.0
    unfused: Code = "compiled" if layout.compile_layers else "huggingface"
    return Program(
        engine=layout.engine if layout.engine != "torch" else "ddp" if layout.zero_stage == 0 else "fsdp",
        code="fused" if fused else "local" if megatron else unfused,
        precision=job.precision,
        linear_layers_only=job.precision == "fp8" and not megatron,
        attention=workload.attention,
        overlaps_gradients=not (layout.engine == "megatron" and layout.vp == 1 and layout.pp > 1),
        # LinearWithGradAccumulationAndAsyncCommunication runs for both of Megatron's implementations; DTensor waits for
        # each of its collectives.
        overlaps_tensor_gradients=layout.engine != "torch",
        gradient_bytes=gradient_bytes(model, layout.gradient_compression, width),
        gradient_kernel_bytes=kernel_bytes(layout.gradient_compression),
        zero_plus_plus=ZeroPlusPlus.of(layout),
        moment_bytes=MOMENTS[job.optimizer.name].rest,
    )


def _lora(spec: LoraSpec | None) -> Lora | None:
    return None if spec is None else Lora(rank=spec.rank, targets=_TARGETS[spec.targets], four_bit=spec.four_bit)


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
        family=model.family,
        traits=model.traits,
        capped_logits=model.logit_softcap is not None,
        parallel_residual=model.parallel_residual,
        shared_norm=model.shared_norm,
        sliding_window=model.sliding_window,
        full_attention_every=model.full_attention_every,
    )
