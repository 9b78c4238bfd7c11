"""Shares of data-sheet figures that real kernels reach, and overheads: data in the catalog, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from kit.specs.catalog.rows import rows
from kit.specs.cluster import GpuSpec
from kit.specs.job import Precision
from kit.units import TFLOP


@dataclass(frozen=True)
class Shared:
    """The same for every GPU; see ``efficiency.yaml`` for units and sources."""

    memory_bandwidth: float
    intra_node_link: float
    inter_node_link: float
    host_link: float
    host_memory_gbytes_per_s: float
    nvme_gbytes_per_s: float
    overlap: float
    kernel_launch_us: float
    intra_node_hop_us: float
    inter_node_hop_us: float


@dataclass(frozen=True)
class Overheads:
    """Memory that no tensor accounts for, GiB."""

    context_gib: float
    communicator_gib: float
    cpu_process_gib: float
    margin: float
    """Share of a GPU's memory that a plan leaves free."""


@cache
def shared() -> Shared:
    """Efficiencies that no GPU changes."""
    return Shared(**rows("efficiency")["shared"])


@cache
def overheads() -> Overheads:
    """Memory overheads."""
    return Overheads(**rows("efficiency")["memory"])


def matmul_flops_per_s(gpu: GpuSpec, precision: Precision) -> float:
    """What matrix products reach, FLOP/s."""
    return peak_flops_per_s(gpu, precision) * float(_row(gpu)["matmul_fp32" if precision == "fp32" else "matmul_bf16"])


def attention_flops_per_s(gpu: GpuSpec, precision: Precision) -> float:
    """What the fused attention operator reaches, FLOP/s."""
    return peak_flops_per_s(gpu, precision) * float(_row(gpu)["attention"])


def peak_flops_per_s(gpu: GpuSpec, precision: Precision) -> float:
    """The data sheet's dense peak, FLOP/s. On a GPU without bf16 that of fp16: rules refuse bf16 there anyway."""
    if precision == "fp32":
        return gpu.fp32_tflops * TFLOP
    tflops = gpu.bf16_tflops if precision == "bf16" and gpu.bf16_tflops else gpu.fp16_tflops
    return tflops * TFLOP


def memory_bytes_per_s(gpu: GpuSpec) -> float:
    """What element-wise kernels reach, bytes/s."""
    return gpu.hbm_gbytes_per_s * 1e9 * shared().memory_bandwidth


def usable_gib(gpu: GpuSpec) -> float:
    """Memory that a plan may fill."""
    return gpu.memory_gib * (1 - overheads().margin)


def _row(gpu: GpuSpec) -> dict[str, Any]:
    gpus: dict[str, dict[str, Any]] = rows("efficiency")["gpus"]
    return gpus.get(gpu.name, gpus["default"])
