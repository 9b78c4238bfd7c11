"""What chunked losses, compiled blocks, kernels and bf16 gradients go with: other combinations were not tried."""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.planner.rules.rule import rule


@rule("torch", "deepspeed")
def fast_path_family(w: Workload) -> str | None:
    """Some model types scale or cap their logits, and some blocks do not compile: only described families were read."""
    on = [name for name in ("chunked_loss", "compile_layers") if getattr(w.layout, name)]
    if on and w.model.approximate is not None:
        return (
            f"{on[0]}=true with {w.model.name}: model type {w.model.model_type} is none of the families that it was "
            "tested with; leave it out"
        )
    return None


# ---------------------------------------------------------------- chunked loss


@rule("deepspeed")
def chunked_loss_head(w: Workload) -> str | None:
    """kit/engines/kernels/chunked_loss.py takes the place of the head of a decoder by transformers."""
    if w.layout.chunked_loss and w.layout.implementation != "huggingface":
        return (
            f"chunked_loss=true with implementation={w.layout.implementation}: it is for the heads of Hugging Face "
            "models; leave it out, or use huggingface"
        )
    return None


@rule("torch", "deepspeed")
def chunked_loss_whole_rows(w: Workload) -> str | None:
    """The chunked loss computes the whole vocabulary for whole sequences."""
    tp, cp = w.layout.tp, w.layout.cp
    if w.layout.chunked_loss and w.layout.implementation == "huggingface" and (tp > 1 or cp > 1):
        return f"chunked_loss=true with tp={tp}, cp={cp}: it needs a whole head and whole rows; use 1"
    return None


@rule("torch", "deepspeed")
def chunked_loss_decoder(w: Workload) -> str | None:
    """BART and T5 scale or shift their logits."""
    if w.layout.chunked_loss and w.model.is_encoder_decoder:
        return f"chunked_loss=true with {w.model.name}, an encoder-decoder, which scales or shifts logits; leave it out"
    return None


@rule("deepspeed")
def chunked_loss_fp16(w: Workload) -> str | None:
    """The chunked loss computes gradients in forward, before the loss is scaled."""
    if w.layout.chunked_loss and w.job.precision == "fp16":
        return "chunked_loss=true with precision=fp16: its gradients are not scaled before they are rounded; use bf16"
    return None


@rule("torch")
def loss_kernel_needs_chunks(w: Workload) -> str | None:
    """kit/engines/kernels/chunked_loss.py hands Liger's kernel the whole head."""
    if w.layout.loss_kernel == "liger" and not w.layout.chunked_loss:
        return "loss_kernel=liger with chunked_loss=false: it computes a chunk; use chunked_loss=true, or leave it out"
    return None


@rule("torch")
def loss_kernel_needs_cuda(w: Workload) -> str | None:
    """Triton compiles for GPUs."""
    if w.layout.loss_kernel == "liger" and w.cluster.gpu.device != "cuda":
        return f"loss_kernel=liger on {w.cluster.gpu.name}: Triton makes kernels for GPUs; leave it out"
    return None


@rule("torch")
def loss_kernel_softcap(w: Workload) -> str | None:
    """Liger's loss was tested in Triton's interpreter, without a cap."""
    if w.layout.loss_kernel == "liger" and w.model.logit_softcap is not None:
        return (
            f"loss_kernel=liger with {w.model.name}, whose logits are capped: Liger's kernel was not tested with "
            "them; leave it out"
        )
    return None


# ---------------------------------------------------------------- compiled blocks (kit/engines/kernels)


@rule("deepspeed")
def compile_huggingface(w: Workload) -> str | None:
    """Collectives and autograd functions of one's own end a graph."""
    if w.layout.compile_layers and w.layout.implementation != "huggingface":
        return (
            f"compile_layers=true with implementation={w.layout.implementation}: Megatron's layers call collectives "
            "and their own autograd functions, which break compiled graphs; leave it out, transformer_engine has "
            "fused kernels"
        )
    return None


@rule("deepspeed")
def compile_below_zero_3(w: Workload) -> str | None:
    """Stage 3 has hooks on every module inside a block, and each would end a graph."""
    if w.layout.compile_layers and w.layout.zero_stage == 3:
        return (
            "compile_layers=true on engine=deepspeed with zero_stage=3, which gathers weights inside of every block: "
            "compiled graphs would break at each; use zero_stage=1 or 2, or engine=torch"
        )
    return None


@rule("torch", "deepspeed")
def compile_whole_layers(w: Workload) -> str | None:
    """Collectives inside a layer, and bitsandbytes' 4-bit layers, end a graph."""
    layout, lora = w.layout, w.job.lora
    if not layout.compile_layers or layout.implementation != "huggingface":
        return None
    if layout.tp > 1 or layout.cp > 1 or (lora is not None and lora.four_bit):
        return "compile_layers=true with tp>1, cp>1 or four_bit: graphs break at every layer there; leave it out"
    return None


# ---------------------------------------------------------------- attention kernel


@rule("torch")
def attention_kernel_family(w: Workload) -> str | None:
    """Some families compute attention without scaled_dot_product_attention."""
    if w.layout.attention_kernel != "default" and not w.model.traits.fused_attention:
        return f"attention_kernel=cudnn with {w.model.name}, whose attention has no fused kernel; leave it out"
    return None


@rule("torch")
def attention_kernel_bits(w: Workload) -> str | None:
    """cuDNN's kernel is for 16 bits."""
    gpu = w.cluster.gpu
    if w.layout.attention_kernel != "default" and (gpu.device != "cuda" or w.job.precision == "fp32"):
        return (
            f"attention_kernel=cudnn on {gpu.name} in {w.job.precision}: cuDNN's attention needs a GPU and 16 bits; "
            "leave it out"
        )
    return None


# ---------------------------------------------------------------- gradients in bf16 (kit/engines/torch/fsdp.py)


@rule("torch")
def gradient_dtype_needs_fsdp2(w: Workload) -> str | None:
    """FSDP2's hook rounds them."""
    layout = w.layout
    if layout.gradient_dtype != "fp32" and (layout.zero_stage < 2 or layout.tp > 1):
        return (
            f"gradient_dtype={layout.gradient_dtype} with zero_stage={layout.zero_stage}, tp={layout.tp}: it is for "
            "FSDP2 without tensor parallelism; use zero_stage=3 and tp=1, or leave it out"
        )
    return None


@rule("torch")
def gradient_dtype_needs_8bit_adamw(w: Workload) -> str | None:
    """8-bit AdamW steps one parameter after the other."""
    job, layout = w.job, w.layout
    if layout.gradient_dtype == "fp32" or layout.zero_stage < 2 or layout.tp > 1:
        return None
    if job.optimizer.name != "adamw-8bit" or job.precision != "bf16" or job.lora is not None:
        return (
            f"gradient_dtype={layout.gradient_dtype} with optimizer.name={job.optimizer.name}, precision="
            f"{job.precision}{'' if job.lora is None else ' and lora'}: it is for adamw-8bit on all weights in bf16; "
            "leave it out"
        )
    return None


@rule("torch")
def gradient_dtype_without_accumulation(w: Workload) -> str | None:
    """Accumulation would round every sum over micro batches."""
    layout = w.layout
    if layout.gradient_dtype == "fp32" or w.job.optimizer.name != "adamw-8bit":
        return None
    if layout.gradient_accumulation_steps > 1:
        return (
            f"gradient_dtype={layout.gradient_dtype} with gradient_accumulation_steps="
            f"{layout.gradient_accumulation_steps}: every sum would be rounded to bf16; use one micro batch a step, "
            "or leave it out"
        )
    return None
