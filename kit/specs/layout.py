"""How ranks split the work, which of it a user pinned, and a layout in words."""

import dataclasses
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from kit.specs.validation import Count, FrozenMap, Within, changed, spec, stored

EngineName = Literal["torch", "deepspeed", "megatron"]
ENGINES: tuple[EngineName, ...] = ("torch", "deepspeed", "megatron")
"""Engines, from the simplest to the one with the most settings."""
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]
"""Where state is kept between uses: on the device, in host memory, or on the node's own disks (ZeRO-Infinity)."""
Implementation = Literal["huggingface", "local", "transformer_engine"]
GradientCompression = Literal["none", "bf16", "powersgd"]
"""How fp32 gradients are sent between data-parallel ranks: unchanged, rounded to bf16, or as factors of low rank
(PowerSGD, arXiv 1905.13727)."""
GradientDtype = Literal["fp32", "bf16"]
RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
"""What Megatron's selective recompute can name (transformer_config.py, recompute_modules)."""
OptimizerStateDtype = Literal["fp32", "bf16"]
"""fp32, or 16 bits where the optimizer has none to spare: see ``Layout.optimizer_state_dtype``."""
LOSS_CHUNK_TOKENS = 2048
"""Tokens per chunk of ``chunked_loss``. Every chunk reads and writes the head's gradient, as large as the head. With
half as many tokens this would take as long as half of the chunk's GEMMs on an H100."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending: the sizes that split GPUs, heads, layers or experts evenly."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]


def doubled(least: int, most: int) -> Iterator[int]:
    """``least``, twice as many, and so on, up to ``most``."""
    while least <= most:
        yield least
        least *= 2


def mlp_tiles(tokens: int, hidden_size: int) -> int:
    """Tiles of ``tokens`` positions under ``tiled_mlp``: about as many tokens in one as the hidden size, as ALST (arXiv
    2506.13996) and DeepSpeed's example choose (ulysses_sp.py, TiledMLP)."""
    return -(-tokens // hidden_size)


FP8_MULTIPLE = 16
"""Every dimension of an fp8 GEMM must be a multiple of this (torch._scaled_mm)."""
AttentionKernel = Literal["default", "cudnn", "flash3", "flash4"]
"""The kernel that ``scaled_dot_product_attention`` tries first: torch's choice (FlashAttention-2), cuDNN's, which is
faster on Hopper and later, or FlashAttention 3 or 4 from a package of their own."""
ContextExchange = Literal["all_gather", "p2p", "a2a"]
"""Megatron's ``cp_comm_type``, how context-parallel ranks communicate: all_gather of keys and values, p2p (a ring), or
a2a (all-to-all over heads; DeepSpeed-Ulysses, arXiv 2309.14509)."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """Properties of a layout field, in addition to its name, type and default."""

    engines: tuple[EngineName, ...] = ENGINES
    """Engines that support other values than the default; a rule refuses them on other engines."""
    text: str | FrozenMap = ""
    """Text of ``describe`` for other values than the default: with ``{value}``, or by value; empty: none."""
    zero_key: str = ""
    """For a size: its key below ``zero_optimization`` in ds_config.json."""


Size = Annotated[int, Count(gt=0, le=10**8)]
"""Number of ranks, layers, sequences or buffers."""
ZeroStage = Annotated[int, Count(ge=0, le=3)]
Fraction = Annotated[float, Within(gt=0, le=1)]
Elements = Annotated[int, Count(ge=0, le=10**15)]
"""Elements of a buffer. DeepSpeed's own examples use up to 10¹⁴ to mean no limit."""
_HOST = FrozenMap({"cpu": "optimizer on host", "nvme": "optimizer on NVMe"})
_CP_TEXT = FrozenMap({"p2p": "ring attention", "a2a": "Ulysses"})
_WEIGHTS_ON_HOST = FrozenMap({"cpu": "parameters on host", "nvme": "parameters on NVMe"})


@stored
class Layout:
    """One complete choice. ``world_size = dp·cp·tp·pp``; experts are split otherwise: ``dp·cp·tp = edp·ep·etp``.

    This is the table of layout flags: rules, pins, the search, the one-line description and the digest read it.
    """

    engine: EngineName
    implementation: Implementation
    """The code that computes a layer: Hugging Face's with torch's sdpa, or Megatron-core's without or with
    Transformer Engine. Megatron-core's layers under engine=deepspeed are ZeRO over tensor parallelism."""
    dp: Size = 1
    tp: Size = 1
    pp: Annotated[Size, Flag(("megatron",))] = 1
    vp: Annotated[Size, Flag(("megatron",))] = 1
    """Virtual stages per pipeline rank; 1 = plain 1F1B."""
    first_stage_layers: Annotated[Size | None, Flag(("megatron",))] = None
    """Layers of the first pipeline stage where stages are uneven; null: as many as the others."""
    last_stage_layers: Annotated[Size | None, Flag(("megatron",))] = None
    cp: Size = 1
    """Context parallelism: ranks that share out a sequence."""
    cp_comm_type: Annotated[ContextExchange, Flag(text=_CP_TEXT)] = "all_gather"
    """Read only with cp>1."""
    ep: Annotated[Size, Flag(("torch", "megatron"))] = 1
    """Expert parallelism: ranks that share out the experts of a layer, and exchange tokens."""
    etp: Annotated[Size, Flag(("megatron",))] = 1
    """Tensor parallelism inside each expert; with ep=1 it must equal tp."""
    sp: Annotated[bool, Flag(("deepspeed", "megatron"))] = False
    """Sequence parallelism over the tensor-parallel group."""
    zero_stage: ZeroStage = 0
    """torch: 0 = DDP, 2 and 3 = FSDP2. deepspeed: its stage. megatron: 1 = the distributed optimizer."""
    offload_optimizer: Annotated[Offload, Flag(text=_HOST)] = "none"
    """megatron: its optimizer_cpu_offload."""
    optimizer_offload_fraction: Annotated[Fraction, Flag(("megatron",), "{value:g} of it")] = 1.0
    """megatron: the share of a rank's optimizer that offload_optimizer=cpu takes to the host; the rest is stepped on
    the GPU."""
    offload_param: Annotated[Offload, Flag(("torch", "deepspeed"), _WEIGHTS_ON_HOST)] = "none"
    """torch: FSDP2's CPUOffloadPolicy, which takes both to host memory, for frozen weights with adapters."""
    zero_hpz: Annotated[Size, Flag(("deepspeed",), "hpZ {value}")] = 1
    """ZeRO++: ranks over which parameters are sharded a second time, so that backward gathers inside a node
    (zero_hpz_partition_size, arXiv 2306.10209); 1 = off."""
    zero_quantized_weights: Annotated[bool, Flag(("deepspeed",), "int8 weight gathers")] = False
    """ZeRO++: weights are gathered in int8."""
    zero_quantized_gradients: Annotated[bool, Flag(("deepspeed",), "int4 gradient reductions")] = False
    """ZeRO++: gradients are reduced in int4, by all-to-all."""
    gradient_compression: Annotated[
        GradientCompression, Flag(("torch", "deepspeed"), "{value} gradient compression")
    ] = "none"
    """torch: a communication hook of DDP. deepspeed: its communication_data_type."""
    gradient_dtype: Annotated[GradientDtype, Flag(("torch", "megatron"), "{value} gradients")] = "fp32"
    """torch, FSDP2 with 8-bit AdamW: dtype of the matrices' gradients between backward and the optimizer step.
    megatron: dtype in which gradients are summed and reduced (bf16: grad_reduce_in_fp32=False)."""
    optimizer_state_dtype: Annotated[OptimizerStateDtype, Flag(text="{value} optimizer state")] = "fp32"
    """bf16 under torch: weights, gradients and moments in bf16, and no other copy of the weights; AdamW's 8-bit moments
    stay as they are. Under deepspeed: no fp32 master weights, and moments in bf16 (bf16_master_weights_and_grads,
    bf16_optimizer_states). Under megatron: moments in bf16 with fp32 master weights, by its precision-aware
    optimizer; Megatron-LM runs it, kit's worker does not."""
    fp8_param_gather: Annotated[bool, Flag(("megatron",), "fp8 weights")] = False
    """megatron in fp8: the matrices of layers are kept, and gathered after a step, in fp8 alone, without a bf16 copy;
    Megatron-LM runs it, kit's worker does not."""
    bf16_stochastic_round: Annotated[bool, Flag(("torch",), "stochastic rounding")] = False
    """torch with optimizer_state_dtype=bf16: a new weight is rounded up or down at random, so that its mean is exact
    (torchao's bf16_stochastic_round). The planner's choice there."""
    autocast: Annotated[bool, Flag(("deepspeed",), "autocast")] = False
    """deepspeed: bf16 by torch.autocast over fp32 weights (torch_autocast), not by bf16 weights with fp32 master
    weights. Engine torch always autocasts in bf16 DDP."""
    recompute: Annotated[Recompute, Flag(text="{value} recompute")] = "none"
    """full: only each layer's input is saved. selective: everything except the inside of attention is saved, or of
    ``recompute_modules``."""
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Flag(("megatron",), "of {value}")] = ()
    """megatron, recompute=selective: the modules that backward computes again; none: core_attn."""
    activation_offloading: Annotated[bool, Flag(("torch", "deepspeed"), "saved layer inputs on host")] = False
    """Hugging Face models with full recompute: the saved layer inputs are in pinned host memory from forward to
    backward."""
    chunked_loss: Annotated[bool, Flag(("torch", "deepspeed"), "chunked loss")] = False
    """Hugging Face models: compute output projection and cross entropy together in chunks of tokens, so that all logits
    never exist at once."""
    tiled_mlp: Annotated[bool, Flag(("torch", "deepspeed"), "tiled MLP")] = False
    """Hugging Face models: each MLP computes its tokens in tiles, about as many tokens in one as the hidden size, so
    that its intermediate tensors are those of one tile (ALST, arXiv 2506.13996)."""
    compile_layers: Annotated[bool, Flag(("torch", "deepspeed"), "compiled blocks")] = False
    """torch, and DeepSpeed below stage 3: torch.compile of every transformer block, and of the chunked loss."""
    attention_kernel: Annotated[AttentionKernel, Flag(("torch",), "{value} attention")] = "default"
    """Hugging Face models on engine=torch."""
    micro_batch_size: Size = 1
    """Sequences per data-parallel rank and forward pass."""
    gradient_accumulation_steps: Size = 1
    # DeepSpeed's sizes, in elements. A plan has those that its stage and its offload read; null: not read, or, in a
    # candidate, what ``kit.cost.memory.deepspeed_sizes`` chooses.
    reduce_bucket_size: Annotated[Elements | None, Flag(("deepspeed",), zero_key="reduce_bucket_size")] = None
    """Gradients in one reduction."""
    stage3_prefetch_bucket_size: Annotated[
        Elements | None, Flag(("deepspeed",), zero_key="stage3_prefetch_bucket_size")
    ] = None
    """Weights that are gathered ahead of their use."""
    stage3_max_live_parameters: Annotated[
        Elements | None, Flag(("deepspeed",), zero_key="stage3_max_live_parameters")
    ] = None
    """Weights that may stay gathered."""
    stage3_param_persistence_threshold: Annotated[
        Elements | None, Flag(("deepspeed",), zero_key="stage3_param_persistence_threshold")
    ] = None
    """Parameters up to this size are never split over ranks."""
    sub_group_size: Annotated[Elements | None, Flag(("deepspeed",), zero_key="sub_group_size")] = None
    """Stage 3: parameters of a rank that are stepped at a time."""
    optimizer_buffer_count: Annotated[Size | None, Flag(("deepspeed",), zero_key="offload_optimizer.buffer_count")] = (
        None
    )
    """Host buffers for NVMe transfers of optimizer state, each as large as a sub group."""
    param_buffer_count: Annotated[Size | None, Flag(("deepspeed",), zero_key="offload_param.buffer_count")] = None
    """Host buffers for NVMe transfers of weights."""
    param_buffer_size: Annotated[Elements | None, Flag(("deepspeed",), zero_key="offload_param.buffer_size")] = None
    """Elements of each host buffer of weights."""

    @property
    def master_bytes(self) -> float:
        """Bytes of a weight that the optimizer steps: under torch the model's own. 2 where the optimizer's state is in
        bf16: DeepSpeed's is another bf16 copy (stage3.py compares a device with a device name, and so does not share
        it); Megatron's is the half of an fp32 number that the bf16 weight lacks (optimizer_config.py,
        store_param_remainders)."""
        return 2.0 if self.optimizer_state_dtype == "bf16" else 4.0

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def uses_nvme(self) -> bool:
        """Whether optimizer state or weights are offloaded to NVMe."""
        return "nvme" in (self.offload_optimizer, self.offload_param)

    @property
    def dense_dp(self) -> int:
        """Ranks that hold the same dense parameters, or shard them by ZeRO: context-parallel ranks too."""
        return self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same expert parameters."""
        return max(1, self.dense_dp * self.tp // (self.ep * self.etp))

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp

    def but(self, **chosen: Any) -> Self:
        """Copies the layout with other choices, which the planner made: they are not validated. A search makes tens of
        thousands of copies, and ``dataclasses.replace`` takes ten times as long."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), **chosen)
        return made


_HINTS = Layout.__annotations__  # evaluated: this module has no postponed annotations
DEFAULTS: Mapping[str, Any] = {
    field.name: None if field.default is dataclasses.MISSING else field.default for field in dataclasses.fields(Layout)
}
"""Field of a layout → its default."""
FLAGS: Mapping[str, Flag] = {
    name: flag for name, hint in _HINTS.items() for flag in get_args(hint)[1:] if isinstance(flag, Flag)
}
"""Field of a layout → its columns; a field without them is every engine's, and is printed in its own way."""
ZERO_KEYS: Mapping[str, str] = {name: flag.zero_key for name, flag in FLAGS.items() if flag.zero_key}
"""Field of a layout that is a size of DeepSpeed → its key below ``zero_optimization`` in ds_config.json."""
PINNABLE = tuple(name for name in _HINTS if name not in ("dp", "gradient_accumulation_steps"))
"""Fields that a user may pin. Data parallelism and gradient accumulation follow from them."""


@spec
class Pins:
    """The part of a layout that a user decided: the fields of ``Layout``; null leaves the choice to the planner."""

    __annotations__ = {name: _HINTS[name] | None for name in PINNABLE}
    locals().update(dict.fromkeys(PINNABLE))  # each field's default

    if TYPE_CHECKING:

        def __init__(self, **chosen: Any) -> None:
            """Checks each value as ``Layout`` does."""

        def __getattr__(self, name: str) -> Any:
            """A field of ``Layout``."""

    def but(self, **chosen: Any) -> "Pins":
        """Copies the pins with other choices, which the planner made: they are not validated."""
        return changed(self, **chosen)


# ---------------------------------------------------------------- in words


def engine_name(layout: Layout) -> str:
    """The engine's name, with the implementation if it is not the engine's default."""
    over = layout.engine == "deepspeed" and layout.implementation != "huggingface"
    return layout.engine + (" over megatron" if over else "")


def sharding(layout: Layout) -> str:
    """``zero_stage`` in the engine's own words: DDP, FSDP2, ZeRO-2, distributed optimizer; may be empty."""
    if layout.engine == "torch":
        return ("DDP" if layout.dp > 1 else "", "ZeRO-1", "FSDP2 (zero_stage=2)", "FSDP2")[layout.zero_stage]
    if layout.engine == "megatron" and layout.zero_stage == 1:
        return "distributed optimizer"
    return f"ZeRO-{layout.zero_stage}" if layout.zero_stage else ""


def describe(layout: Layout) -> str:
    """One line: engine, every size that is not one, sharding, flags that are not the default, micro batches."""
    sizes = [f"{name}={size}" for name in ("tp", "cp", "pp", "vp", "ep", "etp") if (size := getattr(layout, name)) > 1]
    ends = [str(end) for end in (layout.first_stage_layers, layout.last_stage_layers) if end]
    stages = f"end stages of {' and '.join(ends)} layers" if ends else ""
    # Nearly all flags have their defaults; comparing tuples finds the others without a call for each.
    given = zip(FLAGS, _values_of(layout), _DEFAULTS, strict=True)
    flags = [flag_text(layout, name, value) for name, value, default in given if value != default]
    batches = f"micro batch {layout.micro_batch_size} x {layout.gradient_accumulation_steps}"
    parts = [
        engine_name(layout),
        *sizes,
        stages,
        "sp" * layout.sp,
        f"dp={layout.dp}",
        sharding(layout),
        *flags,
        batches,
    ]
    return ", ".join(filter(None, parts))


_values_of = attrgetter(*FLAGS)
_DEFAULTS = tuple(DEFAULTS[name] for name in FLAGS)


def flag_text(layout: Layout, name: str, value: Any) -> str:
    """Words for a flag's value that is not its default; may be empty."""
    if name == "cp_comm_type" and layout.cp == 1:
        return ""
    text = FLAGS[name].text
    named = ", ".join(value) if isinstance(value, tuple) else value
    return text.get(value, "") if isinstance(text, Mapping) else text.format(value=named)
