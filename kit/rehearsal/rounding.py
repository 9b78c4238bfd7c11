"""Compares a run in the recipe's own precision with plain torch in fp32, and bounds the effect of rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.rehearsal.scaled_down import ScaledDown

if TYPE_CHECKING:
    import torch

    from kit.engines.protocol import TensorSource

UNIT = 2.0**-8
"""Largest relative rounding error of bf16, which has 8 significant bits. With evenly distributed errors, the root mean
square is 1/√3 of it."""
LAYER_ROUNDINGS = 12
"""Number of consecutive results that a layer rounds to bf16: two norms; query, key and value; rotation; scores;
attention output; output projection; two residual adds; up and gate; their product; down."""
FP8_PRODUCTS = 4
"""Number of consecutive GEMMs in a layer: query, key and value; output projection; up and gate; down."""
E4M3, E5M2 = 2.0**-4, 2.0**-3
"""Largest relative rounding errors of e4m3 (4 significant bits; weights and activations) and e5m2 (3 bits; gradients).
With scaling by the tensor's largest value, all but the smallest numbers are normal, not subnormal."""
OTHER_ROUNDINGS = 3
"""Number of roundings outside of layers: embedding, last norm, logits."""
ROUNDED_BOUND = 0.01
"""Largest allowed share of master weights that are exact bf16 numbers. By chance one fp32 number in 2**16 is; if master
weights were rounded, all would be."""


@dataclass(frozen=True)
class InBf16:
    """Relative distances from the reference. For tensors: the L2 norm of the difference over all tensors, divided by
    the reference's norm."""

    loss_difference: float
    """Largest relative difference of a step's loss."""
    norm_difference: float
    """Largest relative difference of a step's gradient norm."""
    moment_difference: float
    """Distance of Adam's first moments after the last step, which average the gradients of all steps."""
    update_difference: float
    """Distance of the weights' total change by training."""
    rounded_masters: float
    """Share of trained master weights that are exact bf16 numbers, minus the reference's share; of a run with state in
    bf16 the share that are not."""
    precision: str
    """bf16, or fp8 if the CPU emulates it."""
    bound: float
    """Bound of the first three distances (``gradient_bound``)."""
    update_bound: float

    @property
    def passed(self) -> bool:
        """Whether rounding alone explains the differences."""
        return (
            max(self.loss_difference, self.norm_difference, self.moment_difference) <= self.bound
            and self.update_difference <= self.update_bound
            and self.rounded_masters <= ROUNDED_BOUND
        )


def gradient_bound(num_layers: int, precision: str = "bf16") -> float:
    """Expected relative error of a gradient. Forward and backward have equally many roundings. They are independent, so
    their mean squares, ``UNIT``²/3, add up (Higham, Accuracy and Stability of Numerical Algorithms, §2.8).

    fp8 adds the roundings of both operands of every GEMM of linear layers in forward and backward, and of one GEMM for
    the weight's gradient. If signs are mixed, a sum of products has the relative error of one product."""
    squares = UNIT**2 * 2 * (LAYER_ROUNDINGS * num_layers + OTHER_ROUNDINGS)
    if precision == "fp8":
        forward, back = 2 * E4M3**2, E4M3**2 + E5M2**2
        squares += FP8_PRODUCTS * num_layers * (forward + back) + back
    return math.sqrt(squares / 3)


def update_bound(gradient: float, root_mean_square: float, eps: float) -> float:
    """Relative error of a sum of Adam's steps g/(|g| + ε), if the gradients have the relative error ``gradient``.

    A step's derivative by g is ε/(|g| + ε)². If gradients are far below ε, the relative error does not change. If they
    are far above, only the fraction ε/rms of them, those within ε of zero, has a derivative of about 1/ε. The error is
    then rms/ε · √(ε/rms) = √(rms/ε) times as large.
    """
    return gradient * math.sqrt(max(1.0, root_mean_square / eps))


def rounding_of_weights(steps: int, ratio: float) -> float:
    """Expected relative error of the weights' change, if they are rounded stochastically to bf16 at the start and after
    each step. ``ratio``: norm of the weights over that of their change.

    An error has the mean square gap²/6, for evenly distributed values between neighbours; gaps are 2 · ``UNIT`` · |w| /
    m, with mantissas m between 1 and 2 whose logarithms are evenly distributed: the mean of 1/m² is 3/(8 ln 2).
    """
    return math.sqrt((steps + 1) * 3 / (8 * math.log(2)) / 6) * 2 * UNIT * ratio


def compare(
    curves: tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]],
    checkpoints: tuple[Path, Path],
    shrunk: ScaledDown,
    start: TensorSource,
) -> InBf16:
    """Compare logged steps and last checkpoints of (reference, run in bf16). ``start``: the initial
    weights."""
    from kit.engines.protocol import StateKind
    from kit.training.checkpoint.manifest import Checkpoint

    exact, rounded = map(Checkpoint, checkpoints)
    masters, moments = StateKind.MASTER, StateKind.EXP_AVG
    model = shrunk.model
    expected, found = (each.source(masters) for each in (exact, rounded))
    names = expected.names()
    assert shrunk.job_in_bf16 is not None
    precision = shrunk.job_in_bf16.precision
    bound = gradient_bound(model.num_layers + model.encoder_layers, precision)
    rms = _root_mean_square(names, exact.source(moments))
    share, short = _rounded_share(names, found), shrunk.pins_in_bf16.optimizer_state_dtype == "bf16"
    updates = update_bound(bound, rms, shrunk.job.optimizer.eps)
    if short:
        changed = _norm(names, lambda name: expected.read(name) - start.read(name))
        updates = math.hypot(updates, rounding_of_weights(max(curves[0]), _norm(names, start.read) / changed))
    return InBf16(
        loss_difference=largest(*curves, "loss"),
        norm_difference=largest(*curves, "grad_norm"),
        moment_difference=_distance(names, exact.source(moments).read, rounded.source(moments).read),
        update_difference=_distance(
            names, lambda name: expected.read(name) - start.read(name), lambda name: found.read(name) - start.read(name)
        ),
        rounded_masters=1 - share if short else share - _rounded_share(names, expected),
        precision=precision,
        bound=bound,
        update_bound=updates,
    )


def largest(expected: dict[int, dict[str, float]], found: dict[int, dict[str, float]], key: str) -> float:
    """Largest relative difference of the metric ``key`` over the steps."""
    return max(abs(found[step][key] / expected[step][key] - 1) for step in expected)


def _distance(names: Any, expected: Any, found: Any) -> float:
    """‖found − expected‖ / ‖expected‖, over all tensors together."""
    return _norm(names, lambda name: found(name) - expected(name)) / _norm(names, expected)


def _norm(names: Any, read: Any) -> float:
    return math.sqrt(sum(float(read(name).double().square().sum()) for name in names))


def _root_mean_square(names: Any, source: TensorSource) -> float:
    tensors = [source.read(name).double() for name in names]
    return math.sqrt(sum(float(t.square().sum()) for t in tensors) / sum(t.numel() for t in tensors))


def _rounded_share(names: Any, source: TensorSource) -> float:
    """Share of nonzero values that are exact bf16 numbers. Zeros are always exact, so they do not count."""
    import torch

    tensors: list[torch.Tensor] = [tensor[tensor != 0] for tensor in map(source.read, names)]
    rounded = sum(int((tensor.to(torch.bfloat16).float() == tensor).sum()) for tensor in tensors)
    return rounded / sum(tensor.numel() for tensor in tensors)
