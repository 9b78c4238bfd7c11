"""Step time of a published run: options of other programs that no plan sets."""

# A published workload is a workload that has more; only published ones are timed here.
# mypy: disable-error-code="override"

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.programs.published import PublishedWorkload
from kit.cost.collectives import group
from kit.cost.hardware import matmul_s, pcie_bytes_per_s
from kit.cost.model.params import RankParameters
from kit.cost.time.exposed import gathered_again
from kit.cost.time.layer import LayerTime, attention_gemms
from kit.cost.time.step import StepTimeModel

MATRICES, TENSORS = 4, 12
"""Of a GPT layer: ZeRO-3 shards the matrices, and reduces the gradients of all."""
VIEW_S = 1.2e-6
"""Host seconds to make one view of a tensor: measured, torch 2.13 on one core."""


class PublishedStepTime(StepTimeModel):
    """Times published runs."""

    def layer_time(self, workload: PublishedWorkload, has_experts: bool) -> LayerTime:
        """Seconds of a layer without its collectives, with two kinds of selective recompute that kit does not have."""
        layer, modules = super().layer_time(workload, has_experts), workload.recompute_modules
        elements = layer.forward - layer.gemms_forward - layer.attention_forward
        if "op" in modules:
            # torchtitan keeps attention's result and every second GEMM's (models/llama3/infra/parallelize.py).
            return replace(layer, recompute=layer.recompute + 0.5 * layer.gemms_forward + elements)
        if "mla_up_proj" not in modules or workload.model.latent is None:
            return layer
        up = sum(matmul_s(self.gpu.matmul, *gemm) for gemm in attention_gemms(workload)[1:-1])
        return replace(layer, recompute=layer.recompute + up)

    def send_s(self, workload: PublishedWorkload, size_bytes: float, bytes_per_s: float) -> float:
        """Seconds to send activations to the next stage; a part from each tensor-parallel rank, gathered there."""
        pieces = workload.layout.tp if workload.execution.splits_transfers and not workload.layout.sp else 1
        return size_bytes / pieces / bytes_per_s + group(workload.cluster, pieces, 1).all_gather_s(size_bytes)

    def components_s(self, workload: PublishedWorkload) -> dict[str, float]:
        """Seconds by component. ZeRO-3 of 2021 makes a view of each rank's part (two of a gradient's), copies each part
        by a kernel of its own, and zeroes a weight before each gather. The host waits for the device before each gather
        (DeepSpeed 0.3.15, runtime/zero/partition_parameters.py, _allgather_param and _reduce_scatter_gradient), so
        nothing hides this."""
        components = super().components_s(workload)
        if workload.execution.copies_of_ranks:
            parameters, ranks = workload.parameters[0], workload.layout.dp * workload.num_layers
            gathers = 2 + gathered_again(workload, parameters)
            gathered, launch_s = MATRICES * gathers, self.gpu.rates.kernel_launch_us * 1e-6
            seconds = ranks * (gathered * (launch_s + VIEW_S) + TENSORS * (launch_s + 2 * VIEW_S))
            seconds += 2.0 * gathers * parameters.total / self.gpu.bytes_per_s
            # Each gradient was scattered by itself, not only those of matrices.
            more = workload.num_layers * (TENSORS - MATRICES)
            components["data_parallel"] += seconds + more * group(workload.cluster, workload.layout.dp, 1).latency_s
        return components

    def with_offload(
        self, workload: PublishedWorkload, parameters: RankParameters, components: dict[str, float]
    ) -> dict[str, float]:
        """As for plans, or with optimizer state that comes to the device for its step: 24 bytes a parameter."""
        if not workload.execution.offload_to_step_on_device:
            return super().with_offload(workload, parameters, components)
        own = parameters.total / (workload.layout.dp * workload.layout.cp)
        return components | {"offload": 24.0 * own / pcie_bytes_per_s(workload.cluster.gpu)}
