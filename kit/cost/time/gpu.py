"""Sustained rates of a GPU (data-sheet figure times efficiency), and seconds of a GEMM by its shape.

A GEMM of M×K by K×N is split into output tiles; a streaming multiprocessor computes one tile at a time. Tiles that
reach over the edge and the last, partly filled wave waste compute (NVIDIA, Matrix Multiplication Background User's
Guide, "tile quantization" and "wave quantization"). The model assumes that writing the output does not overlap compute,
and takes the longer of computing and reading the inputs.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from kit.cost.collectives import Group, group
from kit.cost.hardware import GpuRates, gpu_rates, peak_flops_per_s, shared
from kit.specs.cluster import ClusterSpec
from kit.units import TFLOP

INPUT_BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1.03, "nvfp4": 0.56}


TILES = ((256, 128, 1.0), (128, 128, 0.80), (128, 64, 0.6), (64, 64, 0.4))
"""(rows, columns, rate relative to the largest tile). Smaller tiles reuse less of the data they load. The order is from
the guide above (figure 5: 256x128 against 128x128 and 64x64 on A100); the rates were fitted to published step times."""


class GemmPerf(NamedTuple):
    """GEMM rates of a GPU at one precision."""

    flops_per_s: float
    """Best sustained rate of large GEMMs."""
    bytes_per_s: float
    """Memory bandwidth that kernels reach."""
    multiprocessors: int
    input_bytes: float
    """Bytes of an element of either input."""


class GpuPerf(NamedTuple):
    """Rates of one GPU at one precision, and the cluster that it is part of."""

    cluster: ClusterSpec
    precision: str
    rates: GpuRates
    matmul: GemmPerf
    """Rates of the linear layers' GEMMs, at ``precision``."""
    others: GemmPerf
    """Rates of the GEMMs of head and experts."""
    attention_flops_per_s: float
    """Fused attention on long sequences, forward and backward together: in 16 bits, or in fp32 throughout."""
    bytes_per_s: float

    def group(self, size: int, stride: int) -> Group:
        """The group of ``size`` ranks that are ``stride`` apart."""
        return group(self.cluster, size, stride)


def gpu_perf(
    cluster: ClusterSpec, precision: str, attention: str = "flash", linear_layers_only: bool = False
) -> GpuPerf:
    """Rates of the cluster's GPU. ``linear_layers_only``: head and experts stay in bf16. Raises KeyError for a
    precision without an efficiency; the planner's rules refuse such plans earlier."""
    gpu = cluster.gpu
    rates = gpu_rates(gpu.name)
    sixteen = (gpu.bf16_tflops or gpu.fp16_tflops or gpu.fp32_tflops) * TFLOP
    # fp32 attention (torch's memory-efficient kernel) is assumed to reach the same share of its peak as flash.
    attention_peak = peak_flops_per_s(gpu, "fp32") if precision == "fp32" else sixteen
    bytes_per_s = gpu.hbm_gbytes_per_s * 1e9 * shared().memory_bandwidth

    def gemms(of: str) -> GemmPerf:
        return GemmPerf(
            flops_per_s=peak_flops_per_s(gpu, of) * rates.matmul[of],
            bytes_per_s=bytes_per_s,
            multiprocessors=rates.multiprocessors,
            input_bytes=INPUT_BYTES[of],
        )

    return GpuPerf(
        cluster=cluster,
        precision=precision,
        rates=rates,
        matmul=gemms(precision),
        others=gemms("bf16" if linear_layers_only else precision),
        attention_flops_per_s=attention_peak * rates.attention.get(attention, rates.attention["flash"]),
        bytes_per_s=bytes_per_s,
    )


def matmul_s(
    gpu: GemmPerf, rows: float, columns: float, inner: float, count: float = 1, output_bytes: float = 2
) -> float:
    """Seconds of ``count`` GEMMs of rows×inner by inner×columns in one launch."""
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
