"""Every rank holds a slice: FSDP2, torch's own ZeRO (torch.distributed.fsdp.fully_shard).

Stage 2 keeps a layer's gathered parameters from forward to backward, stage 3 frees and gathers them again; both
shard gradients and moments, and reduce-scatter the gradients of every micro batch, so that no rank ever holds all of
them. The model is built whole on each rank's device before it is sharded, which bounds its size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from kit.engines.hf import transformer_layers


class Sharded:
    """Parameters, gradients and moments as DTensors, split on their first dimension."""

    local_state_differs = True

    def __init__(self, model: PreTrainedModel, zero_stage: int, compute_dtype: torch.dtype | None) -> None:
        """``compute_dtype``: parameters are gathered in it; gradients are always reduced in fp32."""
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for layer in transformer_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=zero_stage == 3)
        # The root holds embedding and output projection: they are needed again at once when backward starts.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._model = model

    def forward(self, arguments: dict[str, Any], training: bool) -> torch.Tensor:
        """Logits."""
        return self._model(**arguments).logits

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Nothing to hold back: sharded gradients are summed micro batch by micro batch."""
        return nullcontext()

    def resumed_after(self, steps: int) -> None:
        """Nothing here remembers earlier steps."""

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collective: gathers the whole tensor on every rank."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def fill(self, target: torch.Tensor, full: torch.Tensor) -> None:
        """Each rank takes its slice of what it read itself: no communication."""
        assert isinstance(target, DTensor)
        on_device = full.to(target.device, target.dtype)
        target.copy_(distribute_tensor(on_device, target.device_mesh, target.placements, src_data_rank=None))
