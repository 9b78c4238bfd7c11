"""What optimizers remember of a parameter."""

from __future__ import annotations

from dataclasses import dataclass

from kit.specs.job import OptimizerName


@dataclass(frozen=True)
class Moments:
    """Bytes per parameter of an optimizer's moments, without master weights."""

    matrices: float
    """Moments of the layers' matrices."""
    rest: float
    """Moments of embeddings and head; of norms and biases too, unless ``vectors`` says otherwise."""
    vectors: float | None = None


BLOCK = 256
"""Elements that share a scale in 8-bit moments: bitsandbytes' choice (optim/optimizer.py, init_state)."""

MOMENTS: dict[OptimizerName, Moments] = {
    "adamw": Moments(matrices=8.0, rest=8.0),
    # Two moments of a byte, an fp32 scale for each block; vectors in fp32 (kit/engines/torch/eight_bit.py).
    "adamw-8bit": Moments(matrices=2 + 2 * 4 / BLOCK, rest=2 + 2 * 4 / BLOCK, vectors=8.0),
    # Sums of rows and columns of the second moment, no first one (arXiv 1804.04235): a few vectors.
    "adafactor": Moments(matrices=0.0, rest=0.0),
    "sgd": Moments(matrices=4.0, rest=4.0),
    # One momentum for matrices of layers, AdamW for embeddings, head and vectors (Keller Jordan's Muon, 2024).
    "muon": Moments(matrices=4.0, rest=8.0),
}
