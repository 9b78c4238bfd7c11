"""Rules of chunked losses, compiled blocks, attention kernels and bf16 gradients; they refuse untested combinations."""

from __future__ import annotations

from kit.cost.hardware import runs_rocm
from kit.cost.workload import Workload
from kit.planner.rules.rule import rule


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"{'chunked_loss' if w.layout.chunked_loss else 'compile_layers'}=true with {w.model.name}: model type "
        f"{w.model.model_type} is none of the families that it was tested with; leave it out"
    ),
)
def fast_path_family(w: Workload) -> bool:
    """Some model types scale or cap their logits, and some blocks do not compile. kit checked only its described
    families."""
    return (w.layout.chunked_loss or w.layout.compile_layers) and w.model.approximate is not None


# ---------------------------------------------------------------- saved layer inputs on the host


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"activation_offloading=true with recompute={w.layout.recompute}: it is for the layer inputs that full "
        "recompute saves; use recompute=full"
    ),
)
def offloads_layer_inputs(w: Workload) -> bool:
    """transformers wraps each checkpointed layer alone (modeling_utils.py, activation_checkpointing_enable)."""
    return w.layout.activation_offloading and w.layout.recompute != "full"


@rule(
    "torch",
    "deepspeed",
    message=(
        "activation_offloading=true with Megatron's layers or compile_layers=true; use huggingface, without compiling"
    ),
)
def offloads_of_eager_layers(w: Workload) -> bool:
    """Megatron's layers recompute by another function, and compiled blocks were not tested with it."""
    layout = w.layout
    return layout.activation_offloading and (layout.implementation != "huggingface" or layout.compile_layers)


# ---------------------------------------------------------------- tiled MLP


NO_MLP_MODULE = ("opt", "bloom")
"""Families whose layers have no module ``mlp`` of one argument (modeling_opt.py, modeling_bloom.py)."""


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"tiled_mlp=true with {w.model.name}: it is for decoders of the described families with dense MLPs of their "
        "own module; leave it out"
    ),
)
def tiled_mlp_dense(w: Workload) -> bool:
    """A tile of tokens would have a router's statistics of its own. kit/engines/kernels/tiled_mlp.py replaces a layer's
    ``mlp``."""
    model = w.model
    other = model.approximate is not None or model.is_encoder_decoder or model.family in NO_MLP_MODULE
    return w.layout.tiled_mlp and (other or model.num_experts > 0)


@rule(
    "torch",
    "deepspeed",
    message="tiled_mlp=true with Megatron's layers, tp>1, compile_layers=true, precision=fp8 or lora: it was tested on "
    "whole Hugging Face layers in 16 and 32 bits, with all weights trained; leave it out",
)
def tiled_mlp_alone(w: Workload) -> bool:
    """Checkpoints break compiled graphs, collectives would run for every tile, and fp8 scales are per tensor."""
    layout = w.layout
    other = layout.implementation != "huggingface" or layout.tp > 1 or layout.compile_layers
    return layout.tiled_mlp and (other or w.job.precision == "fp8" or w.job.lora is not None)


# ---------------------------------------------------------------- chunked loss


@rule(
    "deepspeed",
    message=lambda w: (
        f"chunked_loss=true with implementation={w.layout.implementation}: it is for the heads of Hugging Face "
        "models; leave it out, or use huggingface"
    ),
)
def chunked_loss_head(w: Workload) -> bool:
    """kit/engines/kernels/chunked_loss.py replaces the head of a transformers decoder."""
    return w.layout.chunked_loss and w.layout.implementation != "huggingface"


@rule(
    "torch",
    "deepspeed",
    message=lambda w: f"chunked_loss=true with tp={w.layout.tp} on Hugging Face layers: it needs a whole head; use 1",
)
def chunked_loss_whole_head(w: Workload) -> bool:
    """The chunked loss computes the whole vocabulary. Labels are shifted already, so a part of a row is enough."""
    return w.layout.chunked_loss and w.layout.implementation == "huggingface" and w.layout.tp > 1


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"chunked_loss=true with {w.model.name}, an encoder-decoder, which scales or shifts logits; leave it out"
    ),
)
def chunked_loss_decoder(w: Workload) -> bool:
    """BART and T5 scale or shift their logits."""
    return w.layout.chunked_loss and w.model.is_encoder_decoder


@rule(
    "deepspeed",
    message="chunked_loss=true with precision=fp16: its gradients are not scaled before they are rounded; use bf16",
)
def chunked_loss_fp16(w: Workload) -> bool:
    """The chunked loss computes gradients in forward, before the loss is scaled."""
    return w.layout.chunked_loss and w.job.precision == "fp16"


# ---------------------------------------------------------------- compiled blocks (kit/engines/kernels)


@rule(
    "deepspeed",
    message=lambda w: (
        f"compile_layers=true with implementation={w.layout.implementation}: Megatron's layers call collectives "
        "and their own autograd functions, which break compiled graphs; leave it out, transformer_engine has "
        "fused kernels"
    ),
)
def compile_huggingface(w: Workload) -> bool:
    """Collectives and custom autograd functions inside a layer cause graph breaks."""
    return w.layout.compile_layers and w.layout.implementation != "huggingface"


@rule(
    "deepspeed",
    message=(
        "compile_layers=true on engine=deepspeed with zero_stage=3, which gathers weights inside of every block: "
        "compiled graphs would break at each; use zero_stage=1 or 2, or engine=torch"
    ),
)
def compile_below_zero_3(w: Workload) -> bool:
    """Stage 3 has hooks on every module inside a block; each would cause a graph break."""
    return w.layout.compile_layers and w.layout.zero_stage == 3


@rule(
    "torch",
    "deepspeed",
    message="compile_layers=true with tp>1, cp>1 or quantised weights: graphs break at every layer there; leave it out",
)
def compile_whole_layers(w: Workload) -> bool:
    """Collectives inside a layer and bitsandbytes' layers cause graph breaks."""
    broken = w.layout.tp > 1 or w.layout.cp > 1 or (w.job.lora is not None and w.job.lora.quantised != "")
    return broken and w.layout.compile_layers and w.layout.implementation == "huggingface"


# ---------------------------------------------------------------- attention kernel


FLASH_GENERATIONS = {"flash3": ("hopper",), "flash4": ("hopper", "blackwell")}
"""FlashAttention → generations of GPUs that it has kernels for (torch/nn/attention/_fa3.py and _fa4.py)."""


@rule(
    "torch",
    message=lambda w: (
        f"attention_kernel={w.layout.attention_kernel} on {w.cluster.gpu.name}: it has kernels for "
        f"{' and '.join(FLASH_GENERATIONS[w.layout.attention_kernel])} GPUs alone; use cudnn, or leave it out"
    ),
)
def attention_kernel_generation(w: Workload) -> bool:
    """FlashAttention 3 and 4 raise on other GPUs."""
    chosen = FLASH_GENERATIONS.get(w.layout.attention_kernel, (w.generation,))
    return w.generation not in chosen and not runs_rocm(w.cluster.gpu)


@rule(
    "torch",
    message=lambda w: (
        f"attention_kernel={w.layout.attention_kernel} on {w.cluster.gpu.name}: torch's ROCm build has AOTriton's and "
        "CK's flash kernels alone, which are its default; leave it out"
    ),
)
def attention_kernel_rocm(w: Workload) -> bool:
    """ATen/native/transformers/cuda/sdp_utils.cpp, can_use_cudnn_attention: false where USE_ROCM is defined."""
    return w.layout.attention_kernel != "default" and runs_rocm(w.cluster.gpu)


@rule(
    "torch",
    message=lambda w: (
        f"attention_kernel={w.layout.attention_kernel} with {w.model.name}, whose attention has no fused kernel; leave "
        "it out"
    ),
)
def attention_kernel_family(w: Workload) -> bool:
    """Some families compute attention without scaled_dot_product_attention."""
    return w.layout.attention_kernel != "default" and not w.model.traits.fused_attention


@rule(
    "torch",
    message=lambda w: (
        f"attention_kernel={w.layout.attention_kernel} on {w.cluster.gpu.name} in {w.job.precision}: this kernel needs "
        "a GPU and 16 bits; leave it out"
    ),
)
def attention_kernel_bits(w: Workload) -> bool:
    """Kernels other than torch's own are for 16 bits."""
    return w.layout.attention_kernel != "default" and (w.cluster.gpu.device != "cuda" or w.job.precision == "fp32")


# ---------------------------------------------------------------- gradients in bf16 (kit/engines/torch/fsdp.py)


@rule(
    "torch",
    message=lambda w: (
        f"gradient_dtype={w.layout.gradient_dtype} with zero_stage={w.layout.zero_stage}, tp={w.layout.tp}: it is for "
        "FSDP2 without tensor parallelism; use zero_stage=3 and tp=1, or leave it out"
    ),
)
def gradient_dtype_needs_fsdp2(w: Workload) -> bool:
    """Only FSDP2's hook can round gradients to bf16."""
    return w.layout.gradient_dtype != "fp32" and (w.layout.zero_stage < 2 or w.layout.tp > 1)


@rule(
    "torch",
    message=lambda w: (
        f"gradient_dtype={w.layout.gradient_dtype} with optimizer.name={w.job.optimizer.name}, precision="
        f"{w.job.precision}{'' if w.job.lora is None else ' and lora'}: it is for adamw-8bit on all weights in bf16; "
        "leave it out"
    ),
)
def gradient_dtype_needs_8bit_adamw(w: Workload) -> bool:
    """8-bit AdamW steps one parameter at a time, so only one fp32 copy of a gradient exists."""
    other = w.job.optimizer.name != "adamw-8bit" or w.job.precision != "bf16" or w.job.lora is not None
    return other and w.layout.gradient_dtype != "fp32" and w.layout.zero_stage >= 2 and w.layout.tp == 1


@rule(
    "torch",
    message=lambda w: (
        f"gradient_dtype={w.layout.gradient_dtype} with gradient_accumulation_steps="
        f"{w.layout.gradient_accumulation_steps}: every sum would be rounded to bf16; use one micro batch a step, or "
        "leave it out"
    ),
)
def gradient_dtype_without_accumulation(w: Workload) -> bool:
    """Accumulation would round every sum over micro batches."""
    rounded = w.layout.gradient_dtype != "fp32" and w.job.optimizer.name == "adamw-8bit"
    return rounded and w.layout.gradient_accumulation_steps > 1
