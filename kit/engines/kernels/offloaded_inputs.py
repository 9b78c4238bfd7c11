"""The inputs of layers that are recomputed, in host memory between forward and backward; copies run beside compute.

transformers' own offload (``activation_checkpointing_enable(offload=True)``) copies on the compute stream, so a layer
waits for the whole of both its copies. TRL's ``OffloadActivations`` has streams, but takes every tensor that is saved
under it, those of the loss too, keeps up to five in flight (5 GiB for 8B at a million tokens on 8 GPUs), and copies a
tensor back only when it is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kit.errors import EngineError


def offload_inputs(model: PreTrainedModel) -> None:
    """Replace the checkpoints of ``model``, which has recompute on, by ones that keep a layer's input on the host."""
    function: Any = OffloadedInputs()
    model.register_forward_pre_hook(function.begin)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = function


def device_module(device: torch.device) -> ModuleType | None:
    """The module with the streams of a device, such as torch.cuda; None for a CPU, which has none."""
    return None if device.type == "cpu" else torch.get_device_module(device)


class OffloadedInputs:
    """A checkpoint function whose first argument, the layer's input, is in host memory until backward. Others (masks,
    an encoder's output) are the same tensor in every layer, and stay where they are."""

    def __init__(self) -> None:
        self._last: weakref.ref[_Input] | None = None
        self._copies: Any = None

    def begin(self, *_: object) -> None:
        """A new forward pass: its first layer has no layer before it."""
        self._last = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], torch.Tensor) or not torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        kept = _Input(args[0], self, self._last)
        self._last = weakref.ref(kept)
        try:
            with saved_tensors_hooks(kept.pack, _unpack):
                return checkpoint(function, *args, use_reentrant=False, **kwargs)
        finally:
            kept.leave_device()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy, on a GPU beside compute. Returns the event after the copy, None on a CPU."""
        device = source.device if source.device.type != "cpu" else target.device
        streams = device_module(device)
        if streams is None:
            target.copy_(source)
            return None
        self._copies = self._copies or streams.Stream(device)
        # The source is written, and the target's memory free, when the compute stream has come to here.
        self._copies.wait_stream(streams.current_stream())
        with streams.stream(self._copies):
            target.copy_(source, non_blocking=True)
            return self._copies.record_event()


class _Input:
    """One layer's input. Device tensors are memory of the compute stream, and are let go only after that stream waits
    for their copy. So the allocator needs no ``record_stream``, which would keep memory while the host runs ahead."""

    def __init__(self, source: torch.Tensor, lane: OffloadedInputs, previous: weakref.ref[_Input] | None) -> None:
        self._lane, self._previous, self._device = lane, previous, source.device
        self._source: torch.Tensor | None = source.detach()
        self._version = source._version
        self._fetched: torch.Tensor | None = None
        pinned = device_module(source.device) is not None
        self._host = torch.empty_like(self._source, device="cpu", pin_memory=pinned)
        self._copied = lane.copy(self._host, self._source)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Input:
        """This, if ``tensor`` is the layer's input; another tensor as it is."""
        return self if self._source is not None and tensor.is_set_to(self._source) else tensor

    def leave_device(self) -> None:
        """At the end of the layer's forward, beside which the copy runs."""
        assert self._source is not None
        self._wait()
        changed, self._source = self._source._version != self._version, None
        if changed:
            raise EngineError("a layer wrote to its input while it was copied; use activation_offloading=false")

    def take(self) -> torch.Tensor:
        """The input on its device, for compute that follows. The copy of the layer before, the next in backward,
        starts now and runs beside this layer's recompute and backward."""
        if self._fetched is None:
            self._fetch()
        self._wait()
        taken, self._fetched = self._fetched, None
        assert taken is not None
        previous = self._previous() if self._previous else None
        if previous is not None and previous._fetched is None:
            previous._fetch()
        return taken

    def _fetch(self) -> None:
        self._fetched = torch.empty_like(self._host, device=self._device)
        self._copied = self._lane.copy(self._fetched, self._host)

    def _wait(self) -> None:
        streams = device_module(self._device)
        if streams is not None:
            streams.current_stream().wait_event(self._copied)

    def __del__(self) -> None:
        if self._fetched is not None:  # backward failed before it was taken
            self._wait()


def _unpack(packed: torch.Tensor | _Input) -> torch.Tensor:
    return packed.take() if isinstance(packed, _Input) else packed
