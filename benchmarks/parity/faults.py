"""Planted faults: proof that the comparison can fail. Nothing in the kit package knows of them.

A fault is installed in a rank's process before its engine is built, by replacing one function of an engine with a
wrong one. Each names the layout in which it must show (``benchmarks/parity/cases.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake."""

    case: str
    """Name of the parity case that must turn red."""
    install: Callable[[], None]
    """Plants it in this process, for good."""


FAULTS: dict[str, Fault] = {}
"""Name → fault. Each engine's faults are appended below its functions."""


# ---------------------------------------------------------------------- DeepSpeed


def _deepspeed_double_gradients() -> None:
    """As if the division by the number of ranks were cancelled twice; losses stay right."""
    import deepspeed

    backward = deepspeed.DeepSpeedEngine.backward

    def doubled(self, loss, **keywords):
        return backward(self, loss * 2, **keywords)

    deepspeed.DeepSpeedEngine.backward = doubled


def _deepspeed_repeated_data() -> None:
    """Every rank trains on the samples of rank 0, as with a sampler that does not know its rank."""
    import torch.distributed as dist

    from kit.engines.deepspeed.engine import DeepSpeedEngine

    forward_backward = DeepSpeedEngine.forward_backward

    def repeated(self, micro_batches):
        for micro_batch in micro_batches:
            dist.broadcast(micro_batch.input_ids, src=0)
            dist.broadcast(micro_batch.labels, src=0)
        return forward_backward(self, micro_batches)

    DeepSpeedEngine.forward_backward = repeated


def _deepspeed_local_token_count() -> None:
    """The loss is divided by the tokens of this rank instead of those of all."""
    import torch

    from kit.engines.base import IGNORE_INDEX
    from kit.engines.deepspeed import engine

    def local_tokens(micro_batches, device: torch.device) -> int:
        return sum(int((micro_batch.labels != IGNORE_INDEX).sum()) for micro_batch in micro_batches)

    engine.global_tokens = local_tokens


FAULTS["deepspeed-double-gradients"] = Fault("deepspeed-zero3", _deepspeed_double_gradients)
FAULTS["deepspeed-repeated-data"] = Fault("deepspeed-zero2-accumulation", _deepspeed_repeated_data)
FAULTS["deepspeed-local-token-count"] = Fault("deepspeed-zero1", _deepspeed_local_token_count)
