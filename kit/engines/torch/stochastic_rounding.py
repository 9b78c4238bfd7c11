"""AdamW whose new bf16 weights are rounded up or down at random, by torchao.

An update below half of a bf16 weight's last bit (a 256th of the weight, or less) is lost if the sum is rounded to the
nearest. Rounded at random, with the distances as probabilities, it is made now and then, and in the mean as large as it
is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kit.errors import EngineError
from kit.extras import install
from kit.specs.job import OptimizerSpec


@dataclass(frozen=True)
class Rounding:
    """The random numbers of a rank's steps: a function of the run, the rank's shard and the step. So replicas stay
    equal, and a resumed run draws the same."""

    seed: int
    shard: int
    device: torch.device

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """While entered, torch's generators draw this step's numbers; then they are as they were. On a CPU compiled
        optimizers run operator by operator: compiling them takes minutes, and changes no number."""
        digest = hashlib.sha256(f"{self.seed} {self.shard} {step}".encode()).digest()
        on_cpu = self.device.type == "cpu"
        with (
            torch.random.fork_rng(devices=[] if on_cpu else [self.device]),
            torch.compiler.set_stance("force_eager") if on_cpu else nullcontext(),
        ):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            yield


def build_stochastic(groups: list[dict[str, Any]], spec: OptimizerSpec, learning_rate: float) -> torch.optim.Optimizer:
    """torchao's AdamW, which computes in fp32 and keeps moments in the weight's dtype; without moments yet. Raises
    EngineError if torchao is missing."""
    try:
        from torchao.optim import _AdamW
    except ImportError as error:
        raise EngineError(f"bf16_stochastic_round=true needs torchao ({error}); {install('torchao')}") from None
    betas = (spec.beta1, spec.beta2)
    optimizer = _AdamW(groups, learning_rate, betas, spec.eps, bf16_stochastic_round=True)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.state[parameter] = {"step": torch.zeros(())}
    return optimizer
