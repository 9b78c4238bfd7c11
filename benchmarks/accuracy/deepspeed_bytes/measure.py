"""Counts every live tensor of a DeepSpeed process by role and place; tensors without a role are reported as other.

On CPU processes device and host share one memory. A tensor's place is therefore derived from its role: where DeepSpeed
would keep it with a GPU. Each storage counts once, with its padding.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from kit.engines.deepspeed.engine import DeepSpeedEngine

Held = dict[str, int]
"""``weights.device`` and the like → bytes. Kinds: weights, gradients, optimizer, buffers, other."""


GLOO_S = 0.3
"""Wait after a collective: gloo's thread releases its tensors only after it has signalled the end."""


@contextmanager
def from_now_on() -> Iterator[None]:
    """While entered, ``storages`` ignores all earlier objects: tensors, and half a million objects of imports, which
    would take seconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def storages() -> dict[int, int]:
    """Address → bytes of every tensor storage that Python can reach now."""
    found: dict[int, int] = {}
    time.sleep(GLOO_S)
    gc.collect()
    for thing in gc.get_objects():
        # type(), not isinstance: lazy modules may import others when __class__ is read.
        if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def held(engine: DeepSpeedEngine) -> Held:
    """Bytes by role and place, of all tensors created since ``from_now_on``."""
    alive = storages()
    result: Held = {}
    seen: set[int] = set()
    for role, tensor in _roles(engine):
        if tensor is None or not tensor.numel():
            continue
        address, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        # Accumulated gradients may be reachable only through C++ until someone asks for them.
        alive.pop(address, None)
        if address in seen:
            continue
        seen.add(address)
        result[role] = result.get(role, 0) + size
    result["other"] = sum(alive.values())
    result["files.nvme"] = engine.memory_bytes().get("nvme", 0)
    return result


def _roles(engine: DeepSpeedEngine) -> Iterator[tuple[str, Any]]:
    """(kind.place, tensor); the first role of a storage is its role."""
    inner, state = engine._engine, engine._state
    optimizer = inner.optimizer
    zero = inner._config.zero_config
    optimizer_place = "host" if zero.offload_optimizer is not None else "device"
    weights_place = "host" if zero.offload_param is not None else "device"
    yield from ((f"buffers.{place}", buffer) for place, buffer in _buffers(optimizer))
    for parameter in inner.module.parameters():
        yield "weights.device", parameter.data
        yield f"weights.{weights_place}", getattr(parameter, "ds_tensor", None)
        yield f"weights.{weights_place}", getattr(parameter, "ds_secondary_tensor", None)  # hpZ's
    for flat in getattr(optimizer, "param_groups_fp16_flat_cpu_memory", ()):
        yield f"weights.{weights_place}", flat
    for _, master in state.master_weights():
        yield f"optimizer.{optimizer_place}", master.data
        yield f"gradients.{optimizer_place}", master.grad
    for moments in inner.basic_optimizer.state.values():
        yield from ((f"optimizer.{optimizer_place}", t) for t in moments.values() if isinstance(t, torch.Tensor))
    for parameter in inner.module.parameters():
        for gradient in (parameter.grad, getattr(parameter, "grad_accum", None)):
            # With offload below stage 3 gradients are summed elsewhere; the parameter's gradient is part of a bucket.
            left = isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.cpu_offload
            kind = "buffers" if left or _is_part_of_a_bucket(parameter, gradient) else "gradients"
            yield f"{kind}.device", gradient
    yield from ((f"gradients.{place}", tensor) for place, tensor in _summed(optimizer, optimizer_place))
    for copy in getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", ()):
        yield "weights.host", copy


def _is_part_of_a_bucket(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> bool:
    """Whether the gradient is a view of the bucket in which it was reduced."""
    return gradient is not None and gradient.untyped_storage().nbytes() > gradient.element_size() * parameter.numel()


def _summed(optimizer: Any, place: str) -> Iterator[tuple[str, Any]]:
    """(place, gradient) of gradient sums that belong to no parameter and no master weight."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield place, optimizer.grad_partitions_flat_buffer
        if (swapper := optimizer.optimizer_swapper) is not None:
            small = [info.unswapped_gradients.values() for info in swapper.swap_params_info.values()]
            yield from (("host", gradient) for gradients in small for gradient in gradients)
    elif isinstance(optimizer, BF16_Optimizer):
        yield from (("device", gradient) for gradient in optimizer.fp32_groups_gradients_flat)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for gradients in (*optimizer.averaged_gradients.values(), *getattr(optimizer, "all_grad_tensors", {}).values()):
            yield from (("device", gradient) for gradient in gradients or ())
        yield from (("host", each) for each in getattr(optimizer, "accumulated_grads_in_cpu", {}).values())


def _buffers(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Buckets, and the host buffers of gradients and swap files."""
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        buffer = bucket.buffer
        yield from (("device", each) for each in (buffer if isinstance(buffer, list) else [buffer]))
    yield "device", getattr(optimizer, "temp_grad_buffer_for_gpu_offload", None)
    yield "host", getattr(optimizer, "temp_grad_buffer_for_cpu_offload", None)
    if (swapper := getattr(optimizer, "optimizer_swapper", None)) is not None:
        yield from (("host", buffer) for buffer in swapper.swap_buffer_manager.all_buffers)
    groups = getattr(optimizer, "fp16_groups", None)
    weights = getattr(groups[0][0], "nvme_swapper", None) if groups else None
    if weights is not None:
        yield "host", weights.buffers
        yield "host", weights.partitioned_swap_buffer
