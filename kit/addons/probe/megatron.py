"""One rank of a Megatron plan: megatron-core's model, schedule and optimizer, as the engine builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._subclasses.fake_tensor import FakeTensorMode

from kit.addons.probe import cuda_shims
from kit.addons.probe.result import MemorySnapshot
from kit.addons.probe.tracker import LiveBytes, storage_bytes
from kit.emit.megatron import megatron_settings
from kit.engines.huggingface.adapters import adapter_shapes
from kit.engines.megatron import cpu
from kit.engines.megatron.chunks import distributed_chunks
from kit.engines.megatron.model.build import transformer_config
from kit.engines.megatron.optimizer import build_optimizer, optimizer_config
from kit.planner.plan import Plan


def trace(plan: Plan, stage: int) -> MemorySnapshot:
    """Measures one step of the first rank of a pipeline stage. Patches torch permanently, so use a separate process."""
    cpu.install()
    layout, lora = plan.layout, plan.job.lora
    adapters = adapter_shapes(plan.model, lora) if lora else {}  # peft does not build fake tensors
    rank = stage * (layout.world_size // layout.pp)
    with cuda_shims.installed(megatron=True), cuda_shims.fake_world(rank, layout.world_size):
        live = LiveBytes()
        live.masked_select_size = lambda mask: mask.shape[-1] * plan.model.experts_per_token  # of (experts, tokens)
        with FakeTensorMode(allow_non_fake_inputs=True), live:
            try:
                return _step(plan, live, adapters)
            finally:
                parallel_state.destroy_model_parallel()


def _step(plan: Plan, live: LiveBytes, adapters: Mapping[str, tuple[int, ...]]) -> MemorySnapshot:
    settings = megatron_settings(plan)
    parallel_state.initialize_model_parallel(**settings["parallel_state"])
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(settings["transformer_config"])
    ddp = DistributedDataParallelConfig(**{**settings["distributed_data_parallel"], "overlap_grad_reduce": False})
    chunks = distributed_chunks(plan, config, ddp, settings["model"], adapters)
    before = live.now
    optimizer = build_optimizer(optimizer_config(settings["optimizer"]), chunks)
    masters = live.now - before
    config.finalize_model_grads_func = finalize_model_grads
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
    gradients = [buffer.grad_data for buffer in buffers]
    live.leave_out([*weights, *gradients])
    # With the distributed optimizer all parameters are views of one buffer.
    held = MemorySnapshot(
        weights=storage_bytes(weights), gradients=storage_bytes(gradients), optimizer=float(masters), activations=0.0
    )
    begin = live.now
    live.restart()
    kept: list[int] = []
    run = get_forward_backward_func()
    micro_batches = enough_micro_batches(plan)
    size, length = plan.layout.micro_batch_size, plan.job.seq_length
    run(
        forward_step_func=partial(_forward_step, live, kept, size, length // plan.layout.cp),
        data_iterator=[iter(range(micro_batches)) for _ in chunks],
        model=chunks,
        num_microbatches=micro_batches,
        seq_length=length,
        micro_batch_size=size,
        forward_only=False,
    )
    peak = live.peak - begin
    before = live.now
    optimizer.step()
    moments = live.now - before
    return replace(held, optimizer=held.optimizer + moments, activations=peak, kept=max(kept) - begin)


def enough_micro_batches(plan: Plan) -> int:
    """Micro batches that a pipeline needs to reach its peak."""
    layout = plan.layout
    most = layout.gradient_accumulation_steps
    return min(most, layout.pp + 1 if layout.vp == 1 else 2 * layout.pp)


def _forward_step(
    live: LiveBytes, kept: list[int], size: int, length: int, data: Any, model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Forward step of the engine (kit/engines/megatron/engine.py), on tokens that are all 0."""
    next(data)
    ids = torch.zeros(size, length, dtype=torch.long)
    positions = torch.arange(length).expand_as(ids)
    output = model(ids, positions, attention_mask=None, labels=ids)
    kept.append(live.now)
    return output, _sum_loss


def _sum_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {}
