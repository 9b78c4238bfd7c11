"""A rank's chunks of a plan's model, with adapters, wrapped for the reduction of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from kit.engines.megatron.adapters import add_adapters
from kit.engines.megatron.model.build import build_chunks
from kit.engines.megatron.weights.sharding import Shape
from kit.planner.plan import Plan


def distributed_chunks(
    plan: Plan,
    config: TransformerConfig,
    ddp: DistributedDataParallelConfig,
    settings: Mapping[str, Any],
    adapters: Mapping[str, Shape],
) -> list[DistributedDataParallel]:
    """One chunk per virtual pipeline stage, with weights that are not set. ``settings``: ``model`` of megatron.yaml.
    ``adapters``: Hugging Face name → shape of each adapter of ``job.lora``."""
    chunks = build_chunks(plan.model, config, settings, plan.layout.implementation)
    if plan.job.lora is not None:
        add_adapters(chunks, config, plan.model, plan.job.lora, adapters)
    # Only the first chunk has several buckets, as in megatron.training: later chunks reduce while others run.
    return [DistributedDataParallel(config, ddp, chunk, disable_bucketing=at > 0) for at, chunk in enumerate(chunks)]
