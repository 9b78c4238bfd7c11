"""What the parts of the fast path go with: refused where they were not tried, never ignored."""

from __future__ import annotations

from kit.planner.rules.rule import Rule
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


def chunked_loss(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/kernels/chunked_loss.py takes the place of a whole head of a decoder by transformers."""
    if not layout.chunked_loss:
        return None
    if layout.implementation != "huggingface":
        return (
            f"chunked_loss=true with implementation={layout.implementation}: it is for the heads of Hugging Face "
            "models; leave it out, or use huggingface"
        )
    if layout.tp > 1 or layout.cp > 1:
        return f"chunked_loss=true with tp={layout.tp}, cp={layout.cp}: it needs a whole head and whole rows; use 1"
    if model.is_encoder_decoder:
        return f"chunked_loss=true with {model.name}, an encoder-decoder, which scales or shifts logits; leave it out"
    if job.precision == "fp16":
        return "chunked_loss=true with precision=fp16: its gradients are not scaled before they are rounded; use bf16"
    return None


def compile_layers(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/kernels/compiled_blocks.py; stage 3 has hooks on every module inside of a block, and each would end
    a graph."""
    if not layout.compile_layers:
        return None
    if layout.implementation != "huggingface":
        return (
            f"compile_layers=true with implementation={layout.implementation}: Megatron's layers call collectives and "
            "their own autograd functions, at which graphs end; leave it out, transformer_engine has fused kernels"
        )
    if layout.engine == "deepspeed" and layout.zero_stage == 3:
        return (
            "compile_layers=true on engine=deepspeed with zero_stage=3, which gathers weights inside of every block: "
            "graphs would end at each; use zero_stage=1 or 2, or engine=torch"
        )
    if layout.tp > 1 or layout.cp > 1 or (job.lora is not None and job.lora.four_bit):
        return "compile_layers=true with tp>1, cp>1 or four_bit: graphs break at every layer there; leave it out"
    return None


def attention_kernel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/torch/engine.py tells torch the order; cuDNN's kernel is for 16 bits."""
    if layout.attention_kernel == "default":
        return None
    if layout.engine != "torch":
        return f"attention_kernel=cudnn on engine={layout.engine}: only torch asks for a kernel; leave it out"
    if not model.traits.fused_attention:
        return f"attention_kernel=cudnn with {model.name}, whose attention no kernel computes; leave it out"
    if cluster.gpu.device != "cuda" or job.precision == "fp32":
        return (
            f"attention_kernel=cudnn on {cluster.gpu.name} in {job.precision}: cuDNN computes 16 bits on GPUs; "
            "leave it out"
        )
    return None


def gradient_dtype(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """FSDP2's hook shortens them (kit/engines/torch/fsdp.py), 8-bit AdamW steps one parameter after the other."""
    if layout.gradient_dtype == "fp32":
        return None
    said = f"gradient_dtype={layout.gradient_dtype}"
    if layout.engine != "torch" or layout.zero_stage < 2 or layout.tp > 1:
        return (
            f"{said} on engine={layout.engine} with zero_stage={layout.zero_stage}, tp={layout.tp}: it is for FSDP2 "
            "without tensor parallelism; leave it out, or use engine=torch, zero_stage=3, tp=1"
        )
    if job.optimizer.name != "adamw-8bit" or job.precision != "bf16" or job.lora is not None:
        return (
            f"{said} with optimizer.name={job.optimizer.name}, precision={job.precision}"
            f"{'' if job.lora is None else ' and lora'}: it is for adamw-8bit on all weights in bf16; leave it out"
        )
    if layout.gradient_accumulation_steps > 1:
        return (
            f"{said} with gradient_accumulation_steps={layout.gradient_accumulation_steps}: every sum would be rounded "
            "to 8 bits; use a micro batch of all that a rank gets of global_batch_size, or leave it out"
        )
    return None


def loss_kernel(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/kernels/chunked_loss.py hands Liger's kernel the head whole; shown in Triton's interpreter without
    a cap."""
    if layout.loss_kernel == "torch":
        return None
    if not layout.chunked_loss or layout.engine != "torch":
        return (
            f"loss_kernel=liger with chunked_loss={str(layout.chunked_loss).lower()} on engine={layout.engine}: it "
            "computes torch's chunked loss; use chunked_loss=true and engine=torch, or leave it out"
        )
    if cluster.gpu.device != "cuda":
        return f"loss_kernel=liger on {cluster.gpu.name}: Triton makes kernels for GPUs; leave it out"
    if model.logit_softcap is not None:
        return f"loss_kernel=liger with {model.name}, whose logits are capped: it was not tried; leave it out"
    return None


FAST_PATH_RULES: tuple[Rule, ...] = (
    Rule(chunked_loss),
    Rule(loss_kernel),
    Rule(compile_layers),
    Rule(attention_kernel),
    Rule(gradient_dtype),
)
