"""``Workload``: one candidate plan, that is a model, a cluster, a job, and how the ranks split the work.

Memory, time, reliability and the planner's rules are functions of a workload. Workloads are frozen and hashable;
derived sizes are cached properties. Published runs of other programs are a subclass (benchmarks/accuracy/programs).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

from kit.cost.hardware import generation_of
from kit.cost.model.lora import AdaptedLayer, adapted_layers, adapter_parameters_of
from kit.cost.model.params import RankParameters, count, dense_layer_matrices, stage_parameters
from kit.cost.model.pipeline import chunk_layers
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec, TrlObjective, trl_objective
from kit.specs.layout import LOSS_CHUNK_TOKENS, Layout
from kit.specs.model import ModelSpec
from kit.specs.validation import cached

Code = Literal["fused", "compiled", "eager", "huggingface", "local"]
"""How element-wise operators of a layer run. fused: Megatron's, Transformer Engine's or nanotron's own kernels.
compiled: torch.compile. eager: one torch kernel an operator, in 16 bits. huggingface: the same with norms in fp32.
local: kit's Megatron layers."""

UNHIDDEN = 0.65
"""Share of the collective time of FSDP and ZeRO-3 that no compute hides. Fitted to published runs (llm-foundry,
DeepSpeed's Azure and DeepCompile tables). The host waits for an all-gather before it issues the layer, and NCCL's
kernels take multiprocessors from the GEMMs."""


@dataclass(frozen=True, kw_only=True)
class ExecutionModel:
    """How an engine runs a layout: the properties that follow from engine and implementation and decide step time."""

    engine: Literal["megatron", "fsdp", "ddp", "deepspeed"]
    code: Code
    precision: str
    """Precision of the GEMMs."""
    linear_layers_only: bool = False
    """Whether only the GEMMs of linear layers run in ``precision``; head and experts then run in bf16 (torchao). The
    fp8 efficiencies of other programs were fitted to published runs as if every GEMM ran in fp8."""
    attention: str = "flash"
    casts_adapters: bool = False
    """Whether adapters are in fp32 and what enters them in 16 bits: peft from 0.12 on under autocast."""
    overlaps_gradients: bool = True
    """Whether gradients are reduced, and weights gathered, beside compute (Megatron, DDP)."""
    overlaps_tensor_gradients: bool = True
    """Whether tensor-parallel reductions of backward run beside GEMMs of weight gradients."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient that is reduced over data-parallel ranks, before anything compresses it."""
    gradient_sum_bytes: float = 10.0
    """Megatron without fusion: bytes moved per parameter and micro batch to read a 16-bit gradient and to add it to its
    sum."""

    # Values of every plan; other programs have others (benchmarks/accuracy/programs/published.py says what each is).
    overlaps_tensor_parallel = False
    overlaps_experts = False
    once_per_node = False
    graphs = "none"
    balanced_context = True
    unhidden_sharding = UNHIDDEN
    copies_gathered = True
    deepcompile = False
    reduces_in_full = False
    reuse_distance = 0.0
    host_threads: ClassVar[int | None] = None


@dataclass(frozen=True)
class Workload:
    """One candidate plan."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    layout: Layout

    # Values of every plan; other programs have others (benchmarks/accuracy/programs/published.py says what each is).
    hidden_dropout = False
    attention_dropout = False
    capacity_factor = 1.0
    grouped_gemm = True
    recomputed_share = 1.0
    cross_entropy = "unfused"
    deterministic = False
    fsdp_unit = "layer"
    """What FSDP gathers at once: a ``layer``, or the ``model``; lint judges such files (lint/described.py)."""

    @cached
    def _hash_of_work(self) -> int:
        return hash((self.model, self.cluster, self.job))

    @cached
    def _hash(self) -> int:
        return hash((self._hash_of_work, self.layout))

    def __hash__(self) -> int:
        return self._hash

    def with_layout(self, layout: Layout) -> Workload:
        """Replaces the layout; the work stays the same, and is hashed once. A search makes tens of thousands of
        workloads, and a frozen dataclass's own ``__init__`` takes twice as long."""
        made = object.__new__(Workload)
        vars(made).update(
            model=self.model, cluster=self.cluster, job=self.job, layout=layout, _hash_of_work=self._hash_of_work
        )
        return made

    @property
    def activation_offload(self) -> bool:
        """Whether what autograd saves of a layer is in host memory."""
        return self.layout.activation_offloading

    @property
    def mtp_layers(self) -> int:
        """Heads of multi-token prediction that are trained."""
        return self.model.mtp_num_layers

    # ---------------------------------------------------------------- tokens

    @cached
    def trl(self) -> TrlObjective | None:
        """What TRL's trainer does beside the step; None where kit's own loop trains."""
        return trl_objective(self.job)

    @property
    def holds_reference(self) -> bool:
        """Whether there is a second, frozen copy of the weights. With LoRA the adapters are switched off instead."""
        return self.trl is not None and self.trl.reference_forwards > 0 and self.job.lora is None

    @property
    def vllm_share(self) -> float:
        """Share of a GPU's memory that a vLLM in the same process keeps; 0 without one."""
        share = self.job.grpo and self.job.grpo.vllm_gpu_memory_utilization
        return share or 0.0 if self.job.objective == "grpo" else 0.0

    @property
    def vllm_sleeps(self) -> bool:
        """Whether that vLLM keeps its share only while it generates."""
        return self.vllm_share > 0 and self.job.grpo is not None and self.job.grpo.vllm_enable_sleep_mode

    @property
    def completions(self) -> float:
        """Completions of a step on one rank. TRL generates them at once (steps_per_generation is the accumulation)."""
        return self.layout.global_batch_size / self.layout.dp

    @property
    def cached_bytes_per_token(self) -> float:
        """Bytes of keys and values of one generated token in all layers, in 16 bits."""
        return 2.0 * 2 * self.model.key_value_width * self.model.num_layers

    @cached
    def sequences(self) -> int:
        """Sequences of a micro batch."""
        return self.layout.micro_batch_size * (1 if self.trl is None else self.trl.sequences)

    @cached
    def tokens(self) -> float:
        """Tokens of a micro batch on one context-parallel rank."""
        return self.sequences * self.job.seq_length / self.layout.cp

    @cached
    def shard_tokens(self) -> float:
        """Tokens of a rank in norms and the residual stream, which sequence parallelism splits over tp."""
        return self.tokens / (self.layout.tp if self.layout.sp else 1)

    @cached
    def chunked_loss(self) -> bool:
        """Whether the logits of a chunk of tokens exist at a time: by kit's loss, or by the head that TRL gives a model
        (trl/trainer/utils.py, add_fused_lm_head)."""
        return self.layout.chunked_loss or self.trl is not None

    @cached
    def chunk_tokens(self) -> float:
        """Tokens whose logits exist at once in the loss."""
        if not self.chunked_loss:
            return self.tokens
        return min(self.tokens, LOSS_CHUNK_TOKENS)

    @cached
    def routed_per_token(self) -> float:
        """Experts that the fullest rank computes per token of its own. Without expert parallelism each rank computes
        its own tokens, however uneven its experts are."""
        return self.model.experts_per_token * (self.job.expert_load if self.layout.ep > 1 else 1.0)

    # ---------------------------------------------------------------- layers and parameters

    @cached
    def num_layers(self) -> int:
        """Layers of both stacks of an encoder-decoder."""
        return self.model.num_layers + self.model.encoder_layers

    @cached
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Layer numbers of every pipeline chunk, in the order in which a token passes through them. Chunk c is on stage
        c mod pp."""
        return chunk_layers(self.num_layers, self.layout)

    def stage_layers(self, stage: int) -> tuple[int, ...]:
        """All layer numbers of a stage."""
        return tuple(layer for chunk in self.chunks[stage :: self.layout.pp] for layer in chunk)

    @cached
    def stages(self) -> Stages:
        """What kinds of layers the pipeline's stages and chunks have."""
        return _stages_of(self.model, self.chunks, self.layout.pp)

    @cached
    def parameters(self) -> tuple[RankParameters, ...]:
        """Parameter counts on a rank of each pipeline stage."""
        return stage_parameters(self.model, self.layout, chunk_layers(self.model.num_layers, self.layout))

    @cached
    def trained_parameters(self) -> float:
        """Trained parameters of the whole model: all, or with LoRA the adapters' alone."""
        lora = self.job.lora
        return float(count(self.model).total) if lora is None else adapter_parameters_of(self.model, lora)

    @cached
    def adapters(self) -> float | None:
        """LoRA's parameters on a rank of the mean pipeline stage; None without LoRA."""
        lora, layout = self.job.lora, self.layout
        return None if lora is None else adapter_parameters_of(self.model, lora, layout.tp) / layout.pp

    @cached
    def adapted(self) -> tuple[AdaptedLayer, ...]:
        """The layers with an adapter."""
        return () if self.job.lora is None else adapted_layers(self.model, self.job.lora)

    def trained_share(self, parameters: RankParameters) -> float:
        """Trained share of a rank's parameters: 1, or with LoRA adapters over all."""
        return 1.0 if self.adapters is None else self.adapters / parameters.total

    def stepped_parameters(self, parameters: RankParameters) -> float:
        """Trained parameters that the optimizer of a rank with ``parameters`` steps."""
        layout = self.layout
        ranks, expert_ranks = (layout.dense_dp, layout.expert_dp) if layout.zero_stage else (1, 1)
        return self.trained_share(parameters) * (parameters.dense / ranks + parameters.experts / expert_ranks)

    @cached
    def dense_layer_matrices(self) -> float:
        """Elements of the matrices of a layer without experts, on a rank."""
        return dense_layer_matrices(self.model, self.layout)

    # ---------------------------------------------------------------- precision and kernels

    @cached
    def implementation(self) -> str:
        """The code that computes a layer. It decides which tensors autograd saves for backward."""
        return self.layout.implementation

    @cached
    def generation(self) -> str:
        """Generation of the GPU."""
        return generation_of(self.cluster.gpu)

    @cached
    def element(self) -> int:
        """Bytes of an element that layers compute with."""
        return 4 if self.job.precision == "fp32" else 2

    @cached
    def weight_bytes(self) -> int:
        """Bytes of a weight that layers compute with, before autocast."""
        if self.job.precision == "fp32":
            return 4
        return int(self.layout.master_bytes) if self.layout.engine == "torch" else 2

    @cached
    def autocast(self) -> bool:
        """Whether torch.autocast casts fp32 weights for every GEMM, with the residual stream in fp32: the torch engine,
        except where FSDP2 gathers weights in bf16, and DeepSpeed on request."""
        layout = self.layout
        casts = self.job.precision != "fp32" and self.weight_bytes == 4
        return layout.autocast or (casts and layout.engine == "torch" and layout.zero_stage == 0)

    @cached
    def attention(self) -> str:
        """Attention kernel: flash (flash-attn 2), flash3, flash4, cudnn, or unfused, which materialises scores. Torch
        has no fused kernel with a softcap (kit/engines/megatron/model/attention.py). Transformer Engine prefers cuDNN
        on Hopper and later, and flash-attn on older GPUs (dot_product_attention/utils.py, get_attention_backend)."""
        if self.layout.implementation == "local" and self.model.attention_softcap is not None:
            return "unfused"
        if self.layout.implementation == "transformer_engine":
            return "cudnn" if self.generation in ("hopper", "blackwell") else "flash"
        return "flash" if self.layout.attention_kernel == "default" else self.layout.attention_kernel

    @cached
    def compiled_loss(self) -> bool:
        """Whether torch.compile fuses the operators of the loss."""
        return self.chunked_loss and self.layout.compile_layers

    @cached
    def gradient_accumulation_fusion(self) -> bool:
        """Whether the GEMMs of weight gradients add their result to the fp32 gradient buffer themselves."""
        return self.layout.implementation == "transformer_engine"

    @cached
    def keeps_outputs(self) -> bool:
        """Whether pipeline stages keep sent outputs. For interleaved stages kit turns off megatron-core's
        ``deallocate_pipeline_outputs``: it would free a tensor while the send still reads it (kit/emit/megatron.py)."""
        return self.layout.pp > 1 and self.layout.vp > 1

    @cached
    def recompute_modules(self) -> frozenset[str]:
        """Modules that selective recompute recomputes, by Megatron's names."""
        named = self.layout.recompute_modules or ("core_attn",)
        by_module = self.layout.recompute == "selective" and not self.recomputes_by_operator
        return frozenset(named) if by_module else frozenset()

    @cached
    def recomputes_by_operator(self) -> bool:
        """Whether selective recompute saves some operators of a Hugging Face layer, and recomputes the others."""
        return self.layout.recompute == "selective" and self.layout.implementation == "huggingface"

    @cached
    def products(self) -> list[tuple[float, float]]:
        """(output width, input width) of the GEMMs of a dense Hugging Face layer, in their order."""
        model, traits, tp = self.model, self.model.traits, self.layout.tp
        h, ffn = float(model.hidden_size), model.ffn_hidden_size / tp
        query, key_value = model.query_width / tp, model.key_value_width / tp
        of_input = [query + 2 * key_value] if traits.fused_qkv else [query, key_value, key_value]
        of_mlp = [2 * ffn] if traits.fused_gate_up else [ffn] * (2 if model.gated_mlp else 1)
        return [*((width, h) for width in of_input), (h, query), *((width, h) for width in of_mlp), (h, ffn)]

    @cached
    def main_gradient_bytes(self) -> int:
        """Bytes of a gradient that Megatron sums over micro batches."""
        return 2 if self.layout.gradient_dtype == "bf16" else 4

    @cached
    def keeps_bf16_weights(self) -> bool:
        """Whether there is a bf16 weight beside the fp8 copies that GEMMs read."""
        return not self.layout.fp8_param_gather

    @cached
    def execution(self) -> ExecutionModel:
        """How this kit's engines run the layout (kit/emit, kit/engines)."""
        job, layout = self.job, self.layout
        megatron = layout.implementation != "huggingface"
        # FSDP2 reduces in fp32, DDP in the dtype of the weights; DeepSpeed in 16 bits.
        short = layout.engine == "deepspeed" and job.precision != "fp32"
        short |= layout.engine == "torch" and layout.zero_stage == 0 and layout.master_bytes == 2
        width = 2.0 if short else 4.0
        if layout.engine == "megatron":
            width = float(self.main_gradient_bytes)
        torch_code: Code = "compiled" if layout.compile_layers else "huggingface"
        megatron_code: Code = "fused" if layout.implementation == "transformer_engine" else "local"
        return ExecutionModel(
            engine=layout.engine if layout.engine != "torch" else "ddp" if layout.zero_stage == 0 else "fsdp",
            code=megatron_code if megatron else torch_code,
            precision=job.precision,
            linear_layers_only=job.precision == "fp8" and not megatron,
            attention=self.attention,
            casts_adapters=self.autocast,
            overlaps_gradients=not (layout.engine == "megatron" and layout.vp == 1 and layout.pp > 1),
            # LinearWithGradAccumulationAndAsyncCommunication runs for both of Megatron's implementations; DTensor waits
            # for each of its collectives.
            overlaps_tensor_gradients=layout.engine != "torch",
            gradient_bytes=width,
            gradient_sum_bytes=2.0 + 2 * self.main_gradient_bytes,
        )


class Stages(NamedTuple):
    """Kinds of layers, which have experts or not."""

    chunk_kinds: tuple[tuple[int, int], ...]
    """(dense layers, layers with experts) of each chunk."""
    stage_kinds: tuple[tuple[int, int], ...]
    """(dense layers, layers with experts) of each stage."""
    distinct: tuple[int, ...]
    """Stages of which one may need the most memory: the last, and of the others the first of each mix of dense layers
    and layers with experts. Later stages of the same mix have fewer micro batches in flight."""
    equal: tuple[tuple[int, int], ...]
    """(stage, number of stages that take as long): the first, the last, and of those between one of each mix of dense
    layers and layers with experts."""


@lru_cache(maxsize=512)  # layouts share them
def _stages_of(model: ModelSpec, chunks: tuple[tuple[int, ...], ...], pp: int) -> Stages:
    experts = [sum(map(model.has_experts, layers)) if model.num_experts else 0 for layers in chunks]
    kinds = tuple((len(layers) - number, number) for layers, number in zip(chunks, experts, strict=True))
    stages = tuple((sum(dense), sum(moe)) for dense, moe in (zip(*kinds[i::pp], strict=True) for i in range(pp)))
    first = {kinds[stage::pp]: stage for stage in range(pp - 2, -1, -1)}
    between = tuple((stages.index(mix, 1), number) for mix, number in Counter(stages[1:-1]).items())
    equal = ((0, 1), *between, (pp - 1, 1)) if pp > 1 else ((0, 1),)
    return Stages(kinds, stages, (*sorted(first.values()), pp - 1), equal)
