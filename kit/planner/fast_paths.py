"""Ways to run the same layout of plain torch: as operators come, and with what makes them fewer."""

from __future__ import annotations

from dataclasses import replace

from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec


def fast_paths(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, pins: Pins, compiles: bool) -> list[Pins]:
    """As operators come, and with what makes them fewer: blocks compiled, head and loss in chunks. On a GPU, and for
    what that was tried with: decoders with one dense MLP a layer, all of whose weights train on rows of one length.
    Not in a contest of engines on several GPUs: nothing of it has been measured there, and it would decide. But in
    fp8, of which no engine's was."""
    tried = compiles and cluster.gpu.device == "cuda" and job.objective == "pretrain" and job.lora is None
    # Casts to 8 bits, one operator after the other, cost more than fp8's products save.
    tried = tried and (cluster.num_gpus == 1 or pins.engine == "torch" or job.precision == "fp8")
    tried = tried and job.precision in ("bf16", "fp32", "fp8")
    tried = tried and pins.implementation in (None, "huggingface")
    if not tried or model.is_encoder_decoder or model.num_experts:
        return [pins]
    faster = replace(
        pins,
        compile_layers=True if pins.compile_layers is None else pins.compile_layers,
        chunked_loss=True if pins.chunked_loss is None else pins.chunked_loss,
    )
    return [pins] if faster == pins else [pins, faster]
