"""Efficiencies (the share of a data-sheet figure that real kernels reach) and memory overheads, from the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
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
