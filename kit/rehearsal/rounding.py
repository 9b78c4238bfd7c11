"""The scaled-down copy in its recipe's own precision: how far rounding takes it from plain torch's run in fp32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.rehearsal.scaled_down import ScaledDown

if TYPE_CHECKING:
    import torch

    from kit.engines.base import TensorSource

UNIT = 2.0**-8
"""bf16 has 8 significant bits: a rounded number is off by this part of itself at most, by 1/√3 of it in the root mean
square where errors are spread evenly."""
LAYER_ROUNDINGS = 12
"""Results that a layer writes in bf16, one from the other: two norms; query, key, value; their rotation; scores; mix;
output; two sums with the residual; up and gate; their product; down."""
FP8_PRODUCTS = 4
"""GEMMs in a layer that follow one another: query, key and value; output projection; up and gate; down."""
E4M3, E5M2 = 2.0**-4, 2.0**-3
"""Parts of itself by which a number rounded to 4 significant bits, or 3, is off at most: weights and activations are
the first, gradients the second. Scaled to its tensor's largest, all but the smallest numbers are normal ones."""
OTHER_ROUNDINGS = 3
"""Embedding, last norm, logits."""
ROUNDED_BOUND = 0.01
"""Largest share of master weights that bf16 may hold exactly. By chance one fp32 number in 2**16 is also a bf16
number; if master weights were rounded, all of them would be."""


@dataclass(frozen=True)
class InBf16:
    """Relative distances from the reference. For tensors: the L2 norm of the difference, over all tensors together."""

    loss_difference: float
    """Largest of a step."""
    norm_difference: float
    """Largest of a step's gradient norm."""
    moment_difference: float
    """Distance of Adam's first moments after the last step, which average the gradients of all steps."""
    update_difference: float
    """Distance of what training added to the weights."""
    rounded_masters: float
    """Share of trained master weights that a bf16 number holds exactly, beyond the reference's share."""
    precision: str
    """bf16, or fp8 where processors emulate it."""
    bound: float
    """Bound of the first three distances (``gradient_bound``)."""
    update_bound: float

    @property
    def passed(self) -> bool:
        """Whether rounding alone explains what differs."""
        return (
            max(self.loss_difference, self.norm_difference, self.moment_difference) <= self.bound
            and self.update_difference <= self.update_bound
            and self.rounded_masters <= ROUNDED_BOUND
        )


def gradient_bound(num_layers: int, precision: str = "bf16") -> float:
    """Relative error of a gradient: a chain of roundings forward and as long a one back, independent of each other, so
    that their mean squares, ``UNIT``²/3, add up (Higham, Accuracy and Stability of Numerical Algorithms, §2.8).

    fp8: bf16, and both operands of every product of linear layers, forward and back, and of the weight's own gradient.
    A sum of products is off by as much as its products are, where signs are mixed."""
    squares = UNIT**2 * 2 * (LAYER_ROUNDINGS * num_layers + OTHER_ROUNDINGS)
    if precision == "fp8":
        forward, back = 2 * E4M3**2, E4M3**2 + E5M2**2
        squares += FP8_PRODUCTS * num_layers * (forward + back) + back
    return math.sqrt(squares / 3)


def update_bound(gradient: float, root_mean_square: float, eps: float) -> float:
    """Relative error of a sum of Adam's steps g/(|g| + ε), from that of its gradients, spread evenly over them.

    The slope of a step is ε/(|g| + ε)²: where gradients are far below ε an error stays as it is, and far above only the
    part ε/rms of them that lies within ε of zero has a slope, 1/ε: errors are rms/ε · √(ε/rms) times as large.
    """
    return gradient * math.sqrt(max(1.0, root_mean_square / eps))


def compare(
    curves: tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]],
    exchanges: tuple[Path, Path],
    shrunk: ScaledDown,
    start: TensorSource,
) -> InBf16:
    """Compare logged steps and last exchange checkpoints of (reference, run in bf16). ``start``: the first weights."""
    from kit.engines.base import StateKind
    from kit.training.checkpoint.exchange import ExchangeCheckpoint

    exact, rounded = (ExchangeCheckpoint(exchange) for exchange in exchanges)
    masters, moments = StateKind.MASTER, StateKind.EXP_AVG
    model = shrunk.model
    expected, found = (exchange.source(masters) for exchange in (exact, rounded))
    names = expected.names()
    assert shrunk.job_in_bf16 is not None
    precision = shrunk.job_in_bf16.precision
    bound = gradient_bound(model.num_layers + model.encoder_layers, precision)
    rms = _root_mean_square(names, exact.source(moments))
    return InBf16(
        loss_difference=largest(*curves, "loss"),
        norm_difference=largest(*curves, "grad_norm"),
        moment_difference=_distance(names, exact.source(moments).read, rounded.source(moments).read),
        update_difference=_distance(
            names, lambda name: expected.read(name) - start.read(name), lambda name: found.read(name) - start.read(name)
        ),
        rounded_masters=_rounded_share(names, found) - _rounded_share(names, expected),
        precision=precision,
        bound=bound,
        update_bound=update_bound(bound, rms, shrunk.job.optimizer.eps),
    )


def largest(expected: dict[int, dict[str, float]], found: dict[int, dict[str, float]], key: str) -> float:
    """Largest relative difference of a logged figure over the steps."""
    return max(abs(found[step][key] / expected[step][key] - 1) for step in expected)


def _distance(names: Any, expected: Any, found: Any) -> float:
    """‖found − expected‖ / ‖expected‖."""
    apart = sum(float((found(name) - expected(name)).double().square().sum()) for name in names)
    return math.sqrt(apart / sum(float(expected(name).double().square().sum()) for name in names))


def _root_mean_square(names: Any, source: TensorSource) -> float:
    tensors = [source.read(name).double() for name in names]
    return math.sqrt(sum(float(t.square().sum()) for t in tensors) / sum(t.numel() for t in tensors))


def _rounded_share(names: Any, source: TensorSource) -> float:
    """Zeros do not count: they are bf16 numbers wherever they come from."""
    import torch

    tensors: list[torch.Tensor] = [tensor[tensor != 0] for tensor in map(source.read, names)]
    rounded = sum(int((tensor.to(torch.bfloat16).float() == tensor).sum()) for tensor in tensors)
    return rounded / sum(tensor.numel() for tensor in tensors)
