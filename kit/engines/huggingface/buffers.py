"""Buffers that belong to a model's weights and are not trained.

The correction of DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2) is added to the scores that choose experts and
not to those that weigh them. It moves by rule (``job.balancing``, moe_router_bias_update_rate), or stays. It is stored
beside the weights in every checkpoint, always in fp32, and its gradient and moments are zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kit.engines.base import StateKind, TensorSource
from kit.engines.huggingface.experts import names_on_disk
from kit.specs.model import ModelSpec

_ENDING = ".e_score_correction_bias"


def is_buffer(name: str) -> bool:
    """Whether a tensor of this Hugging Face name is such a buffer."""
    return name.endswith(_ENDING)


class SavedBuffers:
    """The saved buffers of one transformers model, by their names on disk; every rank has all of them."""

    def __init__(self, model: torch.nn.Module, spec: ModelSpec) -> None:
        names = [name for name, _ in model.named_buffers() if is_buffer(name)]
        modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        self._modules = {names_on_disk(spec, name)[0]: module for name, module in modules.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name → shape."""
        return {name: tuple(self._tensor(name).shape) for name in self._modules}

    def live(self) -> dict[str, torch.Tensor]:
        """Hugging Face name → the tensor that the model computes with."""
        return {name: self._tensor(name) for name in self._modules}

    def export(self, kind: StateKind) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 CPU copy) of each buffer; zeros for gradients and moments."""
        for name in self._modules:
            copied = self._tensor(name).detach().to("cpu", torch.float32, copy=True)
            yield name, copied if kind is StateKind.MASTER else torch.zeros_like(copied)

    def load(self, kind: StateKind, source: TensorSource) -> None:
        """Set them, in fp32 whatever the model was cast to."""
        if kind is not StateKind.MASTER:
            return
        for name, module in self._modules.items():
            value = source.read(name).to(self._tensor(name).device, torch.float32, copy=True)
            setattr(module, name.rpartition(".")[2], value)

    def _tensor(self, name: str) -> torch.Tensor:
        return getattr(self._modules[name], name.rpartition(".")[2])
