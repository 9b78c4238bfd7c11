"""Counting where the host waits for the device: on a CPU such a place is a call that asks a tensor for its value, on
a GPU torch itself tells of each."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SYNCHRONISED = "called a synchronizing CUDA operation"
"""What torch warns of in its sync debug mode (c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync)."""
OWNERS = ("kit", "transformers", "deepspeed", "megatron")


class Waits(TorchFunctionMode):
    """Places in kit, transformers and the engines where Python asks a tensor for its value: on a GPU the host waits."""

    ASKING = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.ASKING:
            note(self.places)
        return func(*args, **(kwargs or {}))


class HiddenWaits(TorchDispatchMode):
    """Counts waits inside an operator (masks as indices, sizes that depend on values)."""

    ASKING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in self.ASKING:
            note(self.places)
        return func(*args, **(kwargs or {}))


def note(places: Counter[str]) -> None:
    """Count the nearest caller outside of torch; torch's optimizers keep their step counts on the host."""
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))  # not its path: the checkout itself may lie in a folder named kit
        if module.startswith("torch.optim."):
            return
        if module.partition(".")[0] in OWNERS:
            places[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1
            return
        frame = frame.f_back


def waits_in_a_step(engine, micro_batches) -> tuple[Counter[str], Counter[str]]:
    """Counts the waits of one step of the loop, which asks for the norm before it applies the step."""
    with Waits() as waits, HiddenWaits() as hidden:
        _step(engine, micro_batches)
    return waits.places, hidden.places


def waits_on_this_device(engine, micro_batches, device: str) -> Counter[str]:
    """Places (``file:function``, on CUDA ``file:line``) of one warm step. On CUDA those that torch's sync debug mode
    tells of; on a CPU what asks a tensor for its value, operators that do so from within left out."""
    if device == "cuda":
        with cuda_waits() as places:
            _step(engine, micro_batches)
        return places
    with Waits() as waits:
        _step(engine, micro_batches)
    return waits.places


@contextmanager
def cuda_waits() -> Iterator[Counter[str]]:
    """Filled when the block ends."""
    places: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Where Python stood; in the backward pass, where it was called.
    places.update(f"{Path(each.filename).name}:{each.lineno}" for each in told if SYNCHRONISED in str(each.message))


def _step(engine, micro_batches) -> None:
    engine.forward_backward(micro_batches)
    engine.gradient_norm()
    engine.apply(1e-3)
