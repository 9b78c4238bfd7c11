"""FSDP2 (torch.distributed.fsdp.fully_shard), with or without tensor parallelism.

Stage 2 keeps a layer's gathered parameters from forward to backward; stage 3 frees them and gathers them again. Both
shard gradients and moments, and reduce-scatter the gradients of every micro batch, so that no rank ever has all
gradients. With tensor parallelism the ranks of a tensor-parallel group compute the same samples. Ranks that split a
sequence (context parallelism) shard parameters like data-parallel ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from kit.engines.huggingface.models import transformer_layers
from kit.engines.protocol import TensorSource
from kit.engines.torch.expert_parallel import experts_mesh, spread
from kit.engines.torch.tensor_parallel import cut


def build_mesh(device: torch.device, tp: int) -> DeviceMesh:
    """Mesh of all ranks, of shape (dp·cp, tp). Neighbouring ranks form a tensor-parallel group."""
    return init_device_mesh(device.type, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


class FsdpModel:
    """Parameters, gradients and moments are DTensors, sharded on their first dimension over data-parallel ranks."""

    def __init__(
        self,
        model: PreTrainedModel,
        zero_stage: int,
        compute_dtype: torch.dtype | None,
        device: torch.device,
        mesh: DeviceMesh,
        offload: bool = False,
        load: Callable[[torch.nn.Module], None] | None = None,
        cp: int = 1,
        ep: int = 1,
    ) -> None:
        """``model``: on ``device``, in host memory, or parameters on meta, which then must be set.
        ``compute_dtype``: dtype of gathered parameters. Gradients are always reduced in fp32. ``mesh``: from
        ``build_mesh``. ``offload``: keep parameters, gradients and moments in host memory between their uses.
        ``load``: fills what is on meta below a module, which is then sharded at once, so that no rank ever has the
        whole model. ``cp``: neighbouring ranks that split a sequence; ``ep``: that share out the experts."""
        if mesh["tp"].size() > 1 or ep > 1:
            # This logger advises one collective over both mesh dimensions for full tensors and norms. Only checkpoints
            # gather full tensors, so the advice does not matter.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        if mesh["tp"].size() > 1:
            if load is not None:
                load(model)
            cut(model, mesh["tp"])
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        place = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
        every: dict[str, Any] = {"mesh": mesh["dp"], "mp_policy": policy, "offload_policy": place}
        if ep > 1:
            self._shard_experts(model, experts_mesh(device, ep), mesh, zero_stage == 3, policy)
        for layer in transformer_layers(model):
            if load is not None:
                load(layer)
            fully_shard(layer, reshard_after_forward=zero_stage == 3, **every)
        if load is not None:
            load(model)
        # The root has embedding and output projection. Backward needs them at once, so forward does not free them.
        fully_shard(model, reshard_after_forward=False, **every)
        if next(model.parameters()).is_meta:
            memory = "cpu" if offload else device
            model._apply(lambda tensor: torch.empty_like(tensor, device=memory) if tensor.is_meta else tensor)
        self._model = model
        self.averaged_over = mesh["dp"].size()
        """Ranks over which FSDP2 averages gradients."""
        self.dp_rank, self.dp_size = mesh.get_local_rank("dp") // cp, self.averaged_over // cp
        self.tokens_group: dist.ProcessGroup = mesh.get_group("dp")
        """Ranks whose micro batches make up the step, each token once."""

    @staticmethod
    def _shard_experts(
        model: PreTrainedModel, copies: DeviceMesh, mesh: DeviceMesh, reshard: bool, policy: MixedPrecisionPolicy
    ) -> None:
        """Spread the experts over ``copies["ep"]``, and shard each over the ranks that have it."""
        # The router's weights stay in the dtype that it computed them in, as without expert parallelism.
        policy = replace(policy, cast_forward_inputs=False)
        for experts in spread(model, copies, mesh["tp"]):
            sharded = fully_shard(experts, mesh=copies["copies"], reshard_after_forward=reshard, mp_policy=policy)
            # An expert's gradient is a sum over the tokens of all ranks, which dispatch has brought to its copies.
            sharded.set_gradient_divide_factor(float(mesh["dp"].size()))
            if copies["copies"].size() > 1:
                sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def module(self, training: bool) -> torch.nn.Module:
        """The module to call."""
        return self._model

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro batch's forward and backward: none, because every backward reduce-scatters gradients."""
        return nullcontext()

    def norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Collective. L2 norm of all gradients, each element counted once: a scalar on the device."""
        by_mesh: dict[Any, list[torch.Tensor]] = {}
        for gradient in gradients:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault((mesh, gradient.dtype), []).append(gradient)
        return torch.linalg.vector_norm(torch.stack([full_tensor(norm_in_fp32(group)) for group in by_mesh.values()]))


def norm_in_fp32(gradients: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm of gradients of one mesh and dtype."""
    if gradients[0].dtype is torch.float32:
        return torch.nn.utils.get_total_norm(gradients)
    # get_total_norm would return the gradients' 16-bit dtype.
    each = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(each))


def keep_gradients_in_bf16(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Cast the gradients of FSDP2's matrices to bf16 after FSDP2 has reduced them in fp32.

    FSDP2 calls the hooks of its sharded parameters (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
    foreach_reduce).
    """

    def shorten(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        parameter.grad = gradient.to(torch.bfloat16)

    for parameter in parameters:
        if parameter.ndim > 1:
            parameter.grad_dtype = None  # any
            parameter.register_post_accumulate_grad_hook(shorten)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a DTensor, in its dtype; any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Collective. Gather a DTensor: the whole tensor on every rank, in its dtype. Any other tensor is returned
    unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def read_own(target: torch.Tensor, source: TensorSource, name: str) -> torch.Tensor:
    """The part of tensor ``name`` that this rank has of ``target``, in the dtype on disk. Reads the part's rows."""
    sizes, starts = own_box(target)
    if not sizes:
        return source.read(name)
    rows = source.read_block(name, 0, starts[0], sizes[0])
    within = (slice(start, start + size) for start, size in zip(starts[1:], sizes[1:], strict=True))
    return rows[(slice(None), *within)]


def is_first_replica(tensor: DTensor, tp_rank: int) -> bool:
    """Whether this rank is the first of those that have the same part. ``tp_rank``: this rank's in its tensor-parallel
    group, whose ranks all have what is sharded over data-parallel ranks alone."""
    own = tensor.device_mesh.get_coordinate() or ()
    replicas = [at for at, placement in zip(own, tensor.placements, strict=True) if placement.is_replicate()]
    return not any(replicas) and (tensor.device_mesh.ndim > 1 or tp_rank == 0)


def own_slice(sharded: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """The part of ``full`` that this rank has of ``sharded``, a tensor of the same global shape; all if that is no
    DTensor."""
    sizes, starts = own_box(sharded)
    return full[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def own_box(sharded: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, first index in each dimension) of the part that this rank has; the whole of what is no DTensor."""
    if not isinstance(sharded, DTensor):
        return tuple(sharded.shape), (0,) * sharded.ndim
    sizes, starts = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return tuple(sizes), tuple(starts)
