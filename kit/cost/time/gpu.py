"""A GPU and its links as the clock sees them: data-sheet figures times the shares that kernels reach."""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost.hardware import GpuRates, gpu_rates, peak_flops_per_s, shared
from kit.cost.setup import ComputePrecision
from kit.cost.time.collectives import Group, group
from kit.cost.time.matmul import Processor
from kit.specs.cluster import ClusterSpec
from kit.units import TFLOP

INPUT_BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1.03, "nvfp4": 0.56}


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU at one precision, and the cluster that it is part of."""

    cluster: ClusterSpec
    precision: ComputePrecision
    rates: GpuRates
    matmul: Processor
    """Products of the precision: of linear layers, and of everything else unless that stays in 16 bits."""
    others: Processor
    """Products of the head and of experts."""
    attention_flops_per_s: float
    """Fused attention on long sequences, forward and backward together, always in 16 bits."""
    bytes_per_s: float

    def group(self, size: int, stride: int) -> Group:
        """``size`` ranks, ``stride`` apart."""
        return group(self.cluster, size, stride)


def machine_of(
    cluster: ClusterSpec, precision: ComputePrecision, attention: str = "flash", linear_layers_only: bool = False
) -> Machine:
    """``linear_layers_only``: head and experts stay in bf16. Raises KeyError for a precision without a figure (rules
    refuse such plans before)."""
    gpu = cluster.gpu
    rates = gpu_rates(gpu.name)
    sixteen = (gpu.bf16_tflops or gpu.fp16_tflops or gpu.fp32_tflops) * TFLOP
    bytes_per_s = gpu.hbm_gbytes_per_s * 1e9 * shared().memory_bandwidth

    def processor(of: ComputePrecision) -> Processor:
        return Processor(
            flops_per_s=peak_flops_per_s(gpu, of) * rates.matmul[of],
            bytes_per_s=bytes_per_s,
            multiprocessors=rates.multiprocessors,
            input_bytes=INPUT_BYTES[of],
        )

    return Machine(
        cluster=cluster,
        precision=precision,
        rates=rates,
        matmul=processor(precision),
        others=processor("bf16" if linear_layers_only else precision),
        attention_flops_per_s=sixteen * rates.attention.get(attention, rates.attention["flash"]),
        bytes_per_s=bytes_per_s,
    )
