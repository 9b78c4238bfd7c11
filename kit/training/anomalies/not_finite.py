"""Finds where a NaN or an infinity comes from: runs the step once more with hooks on every module. Only that replay has
hooks, so a step without trouble costs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kit.engines.base import Engine, MicroBatch
from kit.training.checkpoint.collective import gather


def first_module(engine: Engine, micro_batches: Sequence[MicroBatch]) -> str:
    """Collective. Replays a step, whose gradients are discarded, and says where something first was not finite.

    Looks in the order of computing: inputs and weights of the modules as they run, their outputs, then the gradients
    with respect to their outputs. Every rank looks at its own modules; the first of the ranks that found any speaks.
    """
    found: list[str] = []
    engine.discard()
    with _hooks(engine, found):
        try:
            engine.forward_backward(micro_batches)
        finally:
            engine.discard()
    told = [(rank, words[0]) for rank, words in enumerate(gather(found)) if words]
    return f"{told[0][1]} (rank {told[0][0]})" if told else "a replay of the step was finite everywhere"


@contextmanager
def _hooks(engine: Engine, found: list[str]) -> Iterator[None]:
    handles = []
    for name, module in engine.modules().items():
        if next(module.children(), None) is None:  # a container's output is that of a leaf
            handles.append(module.register_forward_hook(_forward(name, found)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward(name: str, found: list[str]) -> Any:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if not found and not _is_finite(tensor):
                found.append(
                    f"the output of {name} ({type(module).__name__}) is not finite, {_because(module, inputs)}"
                )
            if tensor.requires_grad and not found:
                tensor.register_hook(_backward(name, module, found))

    return hook


def _backward(name: str, module: torch.nn.Module, found: list[str]) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        if not found and not _is_finite(gradient):
            found.append(f"in backward the gradient at the output of {name} ({type(module).__name__}) is not finite")

    return hook


def _because(module: torch.nn.Module, inputs: Any) -> str:
    broken = [name for name, parameter in module.named_parameters(recurse=False) if not _is_finite(parameter)]
    if broken:
        return f"and neither is its {broken[0]}"
    if not all(map(_is_finite, _tensors(inputs))):
        return "and neither is its input"
    if any(parameter.numel() == 0 for parameter in module.parameters(recurse=False)):
        return "though its inputs are"  # ZeRO-3 has given its weights back by now
    return "though its inputs and weights are"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
