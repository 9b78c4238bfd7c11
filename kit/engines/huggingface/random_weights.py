"""Random weights of a model that no process but one has whole."""

from __future__ import annotations

import torch
import torch.distributed as dist

from kit.emit.run_directory import RunDirectory
from kit.engines.huggingface.buffers import is_buffer
from kit.engines.huggingface.experts import split_experts
from kit.engines.huggingface.models import random_model, tensor_shapes
from kit.engines.protocol import GeneratedSource


class RandomWeights(GeneratedSource):
    """transformers' random weights of ``run.seed``, under their names on disk.

    Rank 0 builds the model in host memory, in fp32, and sends each tensor to all that read it."""

    collective = True

    def __init__(self, rundir: RunDirectory, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype``: that the weights are rounded to. ``device``: of the collectives."""
        model, self._dtype, self._device = rundir.plan.model, dtype, device
        super().__init__(tensor_shapes(model), rundir.run.seed)
        self._built: dict[str, torch.Tensor] = {}
        if dist.get_rank() == 0:
            built = random_model(model, rundir.run.seed)
            every = [*built.named_parameters(), *(pair for pair in built.named_buffers() if is_buffer(pair[0]))]
            self._built = {each: t.detach() for name, whole in every for each, t in split_experts(model, name, whole)}

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in ``dtype``."""
        if name in self._built:
            whole = self._built[name].to(self._device, self._dtype).contiguous()
        else:
            whole = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        dist.broadcast(whole, src=0)
        return whole.cpu()
