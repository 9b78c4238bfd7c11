"""A layout that breaks one rule, and the same layout mended."""

from __future__ import annotations

import dataclasses
from typing import Any

from kit.cost.workload import Workload
from kit.specs.catalog import load_model
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from tests.support.models import cluster, deepspeed, job

LLAMA = "llama-3.1-8b"


def filled(layout: Layout, gpus: int, sequences: int) -> Layout:
    """dp and accumulation so that GPUs and batch come out."""
    dp = gpus // (layout.tp * layout.pp * layout.cp)
    steps = max(1, sequences // (layout.micro_batch_size * dp))
    return dataclasses.replace(layout, dp=dp, gradient_accumulation_steps=steps)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout that breaks exactly ``rule``, what must be said, and a mended one."""

    rule: str
    bad: Layout
    said: str
    good: Layout
    model: str = LLAMA
    shape: ModelSpec | None = None
    """Instead of a model of the catalog."""
    gpus: str = "8xH100"
    change: dict[str, Any] = dataclasses.field(default_factory=dict)
    good_gpus: str | None = None
    good_change: dict[str, Any] | None = None


STARCODER = ModelSpec(
    name="starcoder",
    family="starcoder2",
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=32,
    vocab_size=1000,
    max_position_embeddings=4096,
)

OVER_MEGATRON = dataclasses.replace(deepspeed(zero_stage=3, tp=2, sp=True), implementation="local")


def settled(case: Case, good: bool) -> Workload:
    machines = cluster((case.good_gpus if good else None) or case.gpus)
    the_job = job(**{**case.change, **((case.good_change or {}) if good else {})})
    layout = case.good if good else case.bad
    if layout.dp == 1 or good:
        layout = filled(layout, machines.num_gpus, the_job.global_batch_size)
    return Workload(model=case.shape or load_model(case.model), cluster=machines, job=the_job, layout=layout)
