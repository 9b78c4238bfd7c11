"""Seconds of a GEMM, by its shape: tensor-core rate, tiles and waves, and what moves through memory.

A product of M×K by K×N is cut into tiles of the output, one to a streaming multiprocessor at a time. Tiles beyond the
edge and the last, partly filled wave compute nothing of use (NVIDIA, Matrix Multiplication Background User's Guide,
"tile quantization" and "wave quantization"). Results leave through memory when a tile is done, and nothing computes
under it in the kernels considered here; a product that moves more than it computes is bound by memory altogether.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

TILES = ((256, 128, 1.0), (128, 128, 0.80), (128, 64, 0.6), (64, 64, 0.4))
"""(rows, columns, rate relative to the largest): smaller tiles reuse less of what they load. The guide above shows the
order (figure 5: 256x128 against 128x128 and 64x64 on A100); the rates were chosen with rows in view."""


@dataclass(frozen=True)
class Processor:
    """What the time of a GEMM depends on: a GPU at one precision."""

    flops_per_s: float
    """Best sustained rate of large GEMMs."""
    bytes_per_s: float
    """Memory, as kernels reach it."""
    multiprocessors: int
    input_bytes: float
    """Bytes of an element of either input."""


def matmul_s(
    gpu: Processor, rows: float, columns: float, inner: float, count: float = 1, output_bytes: float = 2
) -> float:
    """Seconds of ``count`` products of rows×inner by inner×columns in one launch."""
    if rows < 1 or columns < 1 or count <= 0:
        return 0.0
    share = tile_share(gpu.multiprocessors, rows, columns, count)
    busy = 2.0 * rows * columns * inner * count / gpu.flops_per_s / share
    stored = rows * columns * count * output_bytes / gpu.bytes_per_s
    loaded = (rows + columns) * inner * count * gpu.input_bytes / gpu.bytes_per_s
    return max(busy, loaded) + stored


@lru_cache(maxsize=4096)
def tile_share(multiprocessors: int, rows: float, columns: float, count: float = 1) -> float:
    """Share of the best rate that the best tile size reaches on this output."""
    best = 0.0
    for height, width, rate in TILES:
        tiles = ceil(rows / height) * ceil(columns / width) * count
        filled = rows * columns * count / (tiles * height * width)
        waves = tiles / multiprocessors
        best = max(best, rate * filled * waves / ceil(waves))
    return best
