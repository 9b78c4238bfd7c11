"""What the parts of the fast path go with: refused where they were not tried, never ignored."""

from __future__ import annotations

from kit.planner.rule import Rule
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


def chunked_loss(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/linear_loss.py takes the place of a whole head of a decoder by transformers."""
    if not layout.chunked_loss:
        return None
    if layout.implementation != "huggingface-sdpa":
        return (
            f"chunked_loss=true with implementation={layout.implementation}: it is for the heads of Hugging Face "
            "models; leave it out, or use huggingface-sdpa"
        )
    if layout.tp > 1 or layout.cp > 1:
        return f"chunked_loss=true with tp={layout.tp}, cp={layout.cp}: it needs a whole head and whole rows; use 1"
    if model.is_encoder_decoder:
        return f"chunked_loss=true with {model.name}, an encoder-decoder, which scales or shifts logits; leave it out"
    if job.precision == "fp16":
        return "chunked_loss=true with precision=fp16: its gradients are not scaled before they are rounded; use bf16"
    return None


def compile_layers(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> str | None:
    """kit/engines/compiled.py; under DeepSpeed's hooks and with 4-bit kernels it was not tried."""
    if not layout.compile_layers:
        return None
    if layout.engine != "torch":
        return f"compile_layers=true on engine={layout.engine}: it was tried with torch alone; leave it out"
    if layout.tp > 1 or (job.lora is not None and job.lora.four_bit):
        return "compile_layers=true with tp>1 or four_bit: graphs break at every layer there; leave it out"
    return None


FAST_PATH_RULES: tuple[Rule, ...] = (Rule(chunked_loss), Rule(compile_layers))
