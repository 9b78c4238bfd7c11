"""Efficiencies (the share of a data-sheet figure that real kernels reach) and memory overheads, from the catalog; rates
of a GPU, which are data-sheet figures times efficiencies; seconds of a GEMM by its shape.

A GEMM of M×K by K×N is split into output tiles; a streaming multiprocessor computes one tile at a time. Tiles that
reach over the edge and the last, partly filled wave waste compute (NVIDIA, Matrix Multiplication Background User's
Guide, "tile quantization" and "wave quantization"). The model assumes that writing the output does not overlap compute,
and takes the longer of computing and reading the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from math import ceil
from typing import Any, NamedTuple

from kit.specs.catalog.rows import rows
from kit.specs.cluster import ClusterSpec, GpuSpec
from kit.units import TFLOP

MIB = 2.0**20
LARGE_WORKSPACES = ("hopper", "blackwell")
"""Generations for which cuBLAS and Transformer Engine have workspaces of 32 MiB."""


class Shared(NamedTuple):
    """Efficiencies that are equal for every GPU. ``efficiency.yaml`` has units and sources."""

    memory_bandwidth: float
    intra_node_link: float
    inter_node_link: float
    host_link: float
    host_memory: float
    host_memory_gbytes_per_s: float
    host_thread_gbytes_per_s: float
    nvme_gbytes_per_s: float
    overlap: float
    unhidden: float
    intra_node_hop_us: float
    inter_node_hop_us: float


class Overheads(NamedTuple):
    """Memory that no tensor accounts for, GiB."""

    context_gib: float
    communicator_gib: float
    cpu_process_gib: float
    margin: float
    """Share of a GPU's memory that a plan leaves free."""


class GpuRates(NamedTuple):
    """Efficiencies of one GPU generation (``efficiency.yaml``)."""

    matmul: Mapping[str, float]
    """Precision → share of its peak that large GEMMs sustain in a training step."""
    attention: Mapping[str, float]
    """Kernel → share of the 16-bit peak, causal, forward and backward."""
    peak_over_bf16: Mapping[str, float]
    """Precision → its data-sheet peak divided by the bf16 peak."""
    measured: bool
    """Whether step times on this GPU are published."""
    multiprocessors: int
    kernel_launch_us: float
    """Host time to launch one operator."""


@cache
def shared() -> Shared:
    """Efficiencies that are equal for every GPU."""
    return Shared(**rows("efficiency")["shared"])


@cache
def overheads() -> Overheads:
    """Memory overheads."""
    return Overheads(**rows("efficiency")["memory"])


@cache
def gpu_rates(name: str) -> GpuRates:
    """Rates by catalog name; ``default`` where the name is not listed."""
    gpus: dict[str, dict[str, Any]] = rows("efficiency")["gpus"]
    row = gpus.get(name, gpus["default"])
    return GpuRates(**{key: row[key] for key in GpuRates._fields})


def has_rates(gpu: GpuSpec) -> bool:
    """Whether the catalog has rates of this GPU; otherwise those of ``default`` are assumed."""
    return gpu.name in rows("efficiency")["gpus"]


def generation_of(gpu: GpuSpec) -> str:
    """The GPU's generation, from its spec or else the catalog; ``unknown`` if neither has it."""
    return gpu.generation or str(rows("gpus").get(gpu.name, {}).get("generation", "unknown"))


def runs_rocm(gpu: GpuSpec) -> bool:
    """Whether the GPU is AMD's: torch calls it ``cuda`` too, but its libraries are ROCm's."""
    return generation_of(gpu).startswith("cdna")


def usable_gib(gpu: GpuSpec) -> float:
    """GiB that a plan may fill."""
    return gpu.memory_gib * (1 - overheads().margin)


def cublas_workspaces(generation: str) -> float:
    """Bytes of cuBLAS's two workspaces, one for the forward thread and one for autograd's: 32 MiB each on Hopper and
    later, otherwise 8.1 MiB (pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    return 2 * (32 * MIB if generation in LARGE_WORKSPACES else 8.125 * MIB)


def peak_flops_per_s(gpu: GpuSpec, precision: str) -> float:
    """Dense data-sheet peak, FLOP/s; the fp32 peak if the GPU has no units of this precision."""
    if precision in ("bf16", "fp16"):
        own = gpu.bf16_tflops if precision == "bf16" else gpu.fp16_tflops
        return (own or gpu.fp32_tflops) * TFLOP
    factor = gpu_rates(gpu.name).peak_over_bf16.get(precision)
    if factor is None and precision == "fp8" and gpu.fp8_tflops:
        return gpu.fp8_tflops * TFLOP
    return (gpu.fp32_tflops if factor is None else factor * gpu.bf16_tflops) * TFLOP


def pcie_bytes_per_s(gpu: GpuSpec) -> float:
    """Bytes/s of a copy between a GPU and its host, one way."""
    return gpu.pcie_gbytes_per_s * 1e9 * shared().host_link


HOST_STEP_BYTES = {2: 44.0, 3: 50.0}
"""ZeRO stage → bytes of host memory traffic per parameter and step: Adam (28), clip the gradients (8), cast weights to
16 bits (6) into pinned memory, from where they are copied (2). Stage 3 casts into new, pageable memory, which is zeroed
(2) and staged (4) (DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py: unscale_and_clip_grads,
_reassign_or_swap_out_partitioned_parameters; torch, aten/src/ATen/native/cuda/Copy.cu). Gradients arrive beside
backward, and GPUs test and norm them."""
OVERFLOW_TEST_BYTES = 12.0
"""More at stage 3 in fp16: tests of the 16-bit gradients for infinity and NaN (stage3.py, has_overflow)."""

TORCH_STEP_BYTES, TORCH_SUM_BYTES = 40.0, 12.0
"""Bytes of a step by FSDP2: AdamW's fused kernel (28), the norm (4) and clipping (8). And of each micro batch after the
first, whose gradients are added to the sum."""


def host_bytes_per_s(cluster: ClusterSpec, threads: int | None = None) -> float:
    """Bytes/s at which the ranks of a node pass over host memory together. ``threads``: of each rank; None: enough for
    the memory to be the limit."""
    memory = (cluster.host_memory_gbytes_per_s or shared().host_memory_gbytes_per_s) * shared().host_memory
    by_threads = shared().host_thread_gbytes_per_s * cluster.gpus_per_node * threads if threads else memory
    return min(memory, by_threads) * 1e9


# ---------------------------------------------------------------- GEMMs

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
