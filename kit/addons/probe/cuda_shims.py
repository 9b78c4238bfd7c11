"""Replacements for CUDA and the network while fake tensors run: one table, each row with its reason.

The probe measures the memory of a GPU. Where torch uses another operator on a CPU, a shim emulates CUDA's operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from kit.engines.kernels import ring_attention


class FusedRmsNorm(torch.autograd.Function):
    """Saves what torch's RMSNorm saves on CUDA: its input and the reciprocal root (aten/native/layer_norm.cpp,
    _fused_rms_norm). On a CPU it is a chain of operators that save more."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value, weight, value.new_empty(value.shape[:-1], dtype=torch.float32))
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, weight, _ = ctx.saved_tensors
        return torch.empty_like(value), torch.empty_like(weight)


def _attention(
    original: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """CUDA's memory-efficient kernel, if values are narrower than keys (latent attention) or the mask is learned (T5's
    positions). On a CPU torch would materialise the scores."""
    mask = kwargs.get("attn_mask", args[0] if args else None)
    learned = mask is not None and mask.requires_grad
    if not learned and (query.shape[-1] == value.shape[-1] or query.shape[1] != key.shape[1]):
        return original(query, key, value, *args, **kwargs)
    # One bias per sequence, whose gradients are summed, as torch gives it to the kernel.
    bias = mask.expand(*query.shape[:3], key.shape[2]) if mask is not None and learned else None
    attended: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)[0]
    return attended


def _flash_backward(original: Callable[..., Any], tensors: tuple[torch.Tensor, ...], *how: Any) -> Any:
    """The ring's kernel with what CUDA's allocates beside its results: the query's gradient in fp32, and a number for
    every query (aten/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    query = tensors[1]
    sums = query.new_empty(query.shape, dtype=torch.float32), query.new_empty(query.shape[:3], dtype=torch.float32)
    found = original(tensors, *how)
    del sums
    return found


def _gathered_objects(out: list[Any], value: Any, group: Any = None) -> None:
    out[:] = [value] * len(out)


def _fake_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "backend": None})


def _dropout(value: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout as on CUDA, which saves a mask of one byte per element. A CPU saves the mask in the input's dtype, and
    the input."""
    return torch.native_dropout(value, p, training)[0] if training and p else value


def _even_routing(dispatcher: Any, routing_map: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """``MoEAlltoAllTokenDispatcher.preprocess`` with equal numbers of tokens for all experts. Counts are numpy arrays,
    because the dispatcher reads them and a fake tensor has no values."""
    ep, tp, local = dispatcher.ep_size, dispatcher.tp_size, dispatcher.num_local_experts
    dispatcher.num_out_tokens = routing_map.size(0) * dispatcher.config.moe_router_topk
    each = dispatcher.num_out_tokens // dispatcher.num_experts
    if ep > 1 or tp > 1:
        dispatcher.input_splits = numpy.full((ep,), each * local)
        dispatcher.output_splits = numpy.full((ep,), each * local)
        dispatcher.output_splits_tp = numpy.full((tp,), each * local * ep)
    if local > 1:
        dispatcher.num_global_tokens_per_local_expert = numpy.full((tp * ep, local), each)
    return numpy.full((local,), each * tp * ep)


def in_bfloat16(module: torch.nn.Module) -> torch.nn.Module:
    """Casts a module to bf16. torch's own method swaps tensors, which fails for fake tensors with other references."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dtype == torch.float32:
                converted = torch.nn.Parameter(parameter.detach().to(torch.bfloat16))
                converted.__dict__.update(parameter.__dict__)
                setattr(part, name, converted)
    return module


@contextmanager
def installed(megatron: bool) -> Iterator[None]:
    """Installs the table of shims while a probe runs."""
    table: list[tuple[Any, str, Any]] = [
        (torch.nn.RMSNorm, "forward", lambda module, value: FusedRmsNorm.apply(value, module.weight)),  # type: ignore[no-untyped-call]  # torch leaves it untyped
        (F, "scaled_dot_product_attention", partial(_attention, F.scaled_dot_product_attention)),
        (F, "dropout", _dropout),
        (dist, "all_gather_object", _gathered_objects),
        # FSDP2 joins its mesh with that of tensor parallelism, and a mesh reads its ranks.
        (DeviceMesh, "_concatenate", staticmethod(unset_fake_temporarily()(DeviceMesh._concatenate))),
        (dist, "new_group", partial(_fake_group, dist.new_group)),  # gloo groups have no fake counterpart
        (dist, "batch_isend_irecv", lambda _: []),  # what arrives has no values
        (ring_attention, "flash_backward", partial(_flash_backward, ring_attention.flash_backward)),
    ]
    if not megatron:
        from transformers import masking_utils

        # The probe has no packed or padded sequences, so masks are not read; a fake mask has no values.
        table += [
            (masking_utils, "is_tracing", lambda *_: False),
            (masking_utils, "find_packed_sequence_indices", lambda *_: None),
            # peft moves new modules to the device where they already are, and that would swap tensors.
            (torch.nn.Module, "to", lambda module, *_, **__: module),
        ]
    if megatron:
        import megatron.core.distributed.param_and_grad_buffer as buffers
        import megatron.core.optimizer.optimizer as optimizers
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        from kit.engines.megatron.model import attention

        table += [
            # The fake group cannot coalesce: collectives run one by one, and there is no work to wait for.
            (buffers, "_coalescing_manager", lambda *_, **__: nullcontext(SimpleNamespace(wait=lambda: None))),
            (optimizers, "get_grad_norm_fp32", lambda *_, **__: 1.0),  # reads numbers
            (torch.nn.Module, "bfloat16", in_bfloat16),
            # A bias of a special class cannot be a fake tensor; the position of the diagonal changes no size.
            (attention, "causal_lower_right", lambda *_: None),
            (MoEAlltoAllTokenDispatcher, "preprocess", _even_routing),
        ]
    with ExitStack() as undone:
        for owner, name, value in table:
            undone.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """A fake process group of ``size`` ranks, in which this process is one rank and nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
