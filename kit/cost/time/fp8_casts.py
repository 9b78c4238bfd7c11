"""What torchao's products in 8 bits move through memory beside themselves, and what exists while they are made.

Counted in torchao/float8 (0.18): every operand is read for its largest value, and once more to be written in 8 bits, a
weight in forward and again in backward, in each micro batch. Compiled, a block casts what several layers read once;
operator by operator each layer casts its own, through an absolute value, a copy in fp32, one scaled and one clamped.
"""

from __future__ import annotations

from kit.cost.setup import TrainingSetup

COMPILED_BYTES = 6.0
"""An element of 16 bits: read twice, and written in 8 bits in the one or two orientations that its products want."""
EAGER_BYTES = 33.0
"""abs 4, max 2, cast 6, scale 8, clamp 8, cast to 8 bits 5."""
COMPILED_KERNELS, EAGER_KERNELS = 40.0, 120.0
"""Kernels that cast in one block's forward: seven linear layers with two operands each, with a scale."""
EAGER_WORKING_BYTES = 9.0
"""An element while it is cast operator by operator: scaled and clamped in fp32, and 8 bits."""
COMPILED_WORKING_BYTES = 2.0
"""An element in 8 bits, in both orientations."""


def activation_bytes(setup: TrainingSetup, has_experts: bool, compiled: bool) -> float:
    """Bytes that casts of one layer's forward move per micro batch. Backward casts as many gradients and inputs
    again."""
    shape = setup.shape
    width = shape.ffn_hidden_size
    if has_experts and shape.experts is not None:
        width = shape.experts.shared_ffn_hidden_size  # the others are no linear layers, and stay in 16 bits
    h, into_mlp = shape.hidden_size, 2 if shape.gated_mlp else 1
    if compiled:
        return COMPILED_BYTES * (2 * h + shape.value_width + width) * setup.tokens
    return EAGER_BYTES * ((3 + into_mlp) * h + shape.value_width + width) * setup.tokens


def weight_bytes(setup: TrainingSetup, compiled: bool) -> float:
    """A converted parameter's in a micro batch, forward and backward: fp32 where every rank holds it, bf16 gathered."""
    element = 4.0 if setup.sharding == "none" else 2.0
    if compiled:
        return 2 * (2 * element + 1)
    return 2 * (3 * element + EAGER_BYTES - 6)


def cast_workspace_bytes(setup: TrainingSetup, compiled: bool) -> float:
    """Workspace while the largest operand is cast."""
    shape = setup.shape
    widest = max(shape.hidden_size, shape.ffn_hidden_size, shape.value_width)
    element = COMPILED_WORKING_BYTES if compiled else EAGER_WORKING_BYTES
    return element * widest * max(setup.tokens, shape.hidden_size)
