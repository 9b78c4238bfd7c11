"""A plan's layout as a described run, for memory: model, job and layout become a ``TrainingSetup`` with its engine."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kit.cost.engine_memory import engine_memory, uses_autocast
from kit.cost.params import stage_parameters
from kit.cost.plan_setup import shape_of, split_fields
from kit.cost.setup import Attention, Generation, Kernels, Lora, Shape, TrainingSetup
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Implementation, Layout
from kit.specs.model import ModelSpec

_KERNELS: dict[Implementation, Kernels] = {
    "huggingface": "huggingface",
    "local": "local",
    "transformer_engine": "transformer_engine",
}
_TARGETS = {
    "attention": frozenset({"query", "key", "value", "projection"}),
    "all-linear": frozenset({"query", "key", "value", "projection", "mlp"}),
}


def planned_setup(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, layout: Layout) -> TrainingSetup:
    """The run that a layout would be."""
    generation = gpu_generation(cluster.gpu.name)
    return TrainingSetup(
        shape=_shape(model),
        kernels=_KERNELS[layout.implementation],
        attention=_attention(model, layout.implementation, generation),
        **split_fields(model.num_layers, job, layout),
        weight_bytes=4 if job.precision == "fp32" else 2,
        # Interleaved sends are still read when they would be freed (kit/emit/megatron.py).
        keeps_outputs=layout.pp > 1 and layout.vp > 1,
        lora=_lora(job.lora),
        gpu_generation=generation,
        element=4 if job.precision == "fp32" else 2,
        autocast=uses_autocast(job.precision, layout),
        exchange=layout.cp_comm_type,
        chunked_loss=layout.chunked_loss,
        liger_loss=layout.loss_kernel == "liger",
        compiled_layers=layout.compile_layers,
        parameters=stage_parameters(model, layout),
        planned=engine_memory(model, cluster, job, layout),
    )


def gpu_generation(name: str) -> Generation:
    """By marketing name; decides attention kernels and the size of workspaces."""
    marks: dict[Generation, tuple[str, ...]] = {
        "blackwell": ("GB200", "B200", "Blackwell", "GB300", "B300"),
        "hopper": ("H100", "H200", "H800", "H20", "GH200"),
        "ampere": ("A100", "A800", "A10", "3090"),
    }
    for generation, names in marks.items():
        if any(mark in name for mark in names):
            return generation
    return "other"


def _attention(model: ModelSpec, implementation: Implementation, generation: Generation) -> Attention:
    """Torch has no kernel of capped scores (kit/engines/megatron/model/attention.py). Transformer Engine prefers
    cuDNN's kernel on Hopper and later, flash-attn before (dot_product_attention/utils.py, get_attention_backend)."""
    if implementation == "local" and model.attention_softcap is not None:
        return "unfused"
    if implementation == "transformer_engine" and generation in ("hopper", "blackwell"):
        return "cudnn"
    return "flash"


def _lora(spec: LoraSpec | None) -> Lora | None:
    return None if spec is None else Lora(rank=spec.rank, targets=_TARGETS[spec.targets], four_bit=spec.four_bit)


@lru_cache(maxsize=64)
def _shape(model: ModelSpec) -> Shape:
    return replace(
        shape_of(model),
        family=model.family,
        traits=model.traits,
        capped_logits=model.logit_softcap is not None,
        parallel_residual=model.parallel_residual,
        shared_norm=model.shared_norm,
        sliding_window=model.sliding_window,
        full_attention_every=model.full_attention_every,
    )
