"""Buffers that a checkpoint stores with the weights, and that the optimizer does not train.

DeepSeek-V3's router has a correction bias (arXiv 2412.19437, section 2.1.2). It changes which experts a token selects,
but not the weights of their outputs. The bias is constant, or a rule updates it (``job.balancing``,
moe_router_bias_update_rate). Every checkpoint stores it in fp32; its gradient and moments are zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kit.engines.huggingface.experts import names_on_disk
from kit.engines.protocol import StateKind, TensorSource
from kit.specs.model import ModelSpec

_ENDING = ".e_score_correction_bias"


def is_buffer(name: str) -> bool:
    """Whether ``name``, a Hugging Face name, is a router's correction bias."""
    return name.endswith(_ENDING)


class SavedBuffers:
    """The saved buffers of one transformers model, by their names on disk. Every rank has all buffers."""

    def __init__(self, model: torch.nn.Module, spec: ModelSpec) -> None:
        names = [name for name, _ in model.named_buffers() if is_buffer(name)]
        modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        self._modules = {names_on_disk(spec, name)[0]: module for name, module in modules.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name → shape of the buffer."""
        return {name: tuple(self._tensor(name).shape) for name in self._modules}

    def export(self, kind: StateKind) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 CPU copy) of each buffer; zeros for gradients and moments."""
        for name in self._modules:
            copied = self._tensor(name).detach().to("cpu", torch.float32, copy=True)
            yield name, copied if kind is StateKind.MASTER else torch.zeros_like(copied)

    def load(self, kind: StateKind, source: TensorSource) -> None:
        """Set the buffers in fp32, also if the model was cast to 16 bits. No-op for other kinds than MASTER."""
        if kind is not StateKind.MASTER:
            return
        for name, module in self._modules.items():
            value = source.read(name).to(self._tensor(name).device, torch.float32, copy=True)
            setattr(module, name.rpartition(".")[2], value)

    def _tensor(self, name: str) -> torch.Tensor:
        return getattr(self._modules[name], name.rpartition(".")[2])
