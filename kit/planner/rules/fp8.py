"""What torchao converts to products in 8 bits (kit/engines/kernels/fp8.py), and on which GPUs they run."""

from __future__ import annotations

from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import FP8_MULTIPLE, Layout
from kit.specs.model import ModelSpec


def converted_by_torchao(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """torch._scaled_mm: sizes are multiples of 16, on GPUs of compute capability 8.9 and newer; processors emulate it.
    Rows of unequal length are padded for it. Adapters, tensor parallelism and two stacks were not tried."""
    if job.precision != "fp8":
        return None
    if cluster.gpu.device == "cuda" and not cluster.gpu.fp8_tflops:
        return f"precision=fp8 on {cluster.gpu.name}, which has no fp8; use bf16, or a GPU of 2022 or newer (L4, H100)"
    if model.family == "gpt2":
        return (
            f"precision=fp8 on engine=torch with {model.name}: transformers computes GPT-2 by Conv1D, and torchao "
            "converts linear layers; use bf16"
        )
    if model.is_encoder_decoder or job.lora is not None or layout.tp > 1:
        what = model.name if model.is_encoder_decoder else "job.lora" if job.lora else f"tp={layout.tp}"
        return f"precision=fp8 on engine=torch with {what}: it was tried with whole decoders, all trained; use bf16"
    if model.hidden_size % FP8_MULTIPLE:
        return (
            f"precision=fp8 on engine=torch with hidden_size={model.hidden_size} of {model.name}, which is no multiple "
            f"of {FP8_MULTIPLE}: no linear layer could be converted; use bf16"
        )
    tokens = layout.micro_batch_size * job.seq_length
    if job.objective == "pretrain" and tokens % FP8_MULTIPLE:
        return (
            f"precision=fp8 on engine=torch with micro_batch_size·seq_length={tokens}, which is no multiple of "
            f"{FP8_MULTIPLE}: the product that sums over tokens needs it; use seq_length="
            f"{-(-job.seq_length // FP8_MULTIPLE) * FP8_MULTIPLE}"
        )
    return None
