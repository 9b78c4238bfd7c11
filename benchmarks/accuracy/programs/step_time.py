"""Step time of a published run: options of other programs that no plan sets."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.programs.published import PublishedWorkload
from kit.cost.hardware import cpu_adam_s, pcie_bytes_per_s
from kit.cost.model.params import RankParameters
from kit.cost.time.gpu import matmul_s
from kit.cost.time.layer import LayerTime, attention_gemms, expert_gemms, mlp_gemms
from kit.cost.time.step import StepTimeModel


class PublishedStepTime(StepTimeModel):
    """Times published runs."""

    def layer_time(self, workload: PublishedWorkload, has_experts: bool) -> LayerTime:
        """Seconds of a layer without its collectives, with selective recompute of any modules."""
        layer, modules, gemms = super().layer_time(workload, has_experts), workload.recompute_modules, []
        seconds, elements = layer.recompute, layer.forward - layer.gemms_forward - layer.attention_forward
        if "op" in modules:
            # torchtitan keeps attention's result and every second GEMM's (models/llama3/infra/parallelize.py).
            return replace(layer, recompute=seconds + 0.5 * layer.gemms_forward + elements)
        if modules & {"layernorm", "moe_act"}:
            seconds += 0.5 * elements
        if "mla_up_proj" in modules and workload.model.latent is not None:
            gemms += attention_gemms(workload)[1:-1]
        if "moe" in modules and has_experts:
            gemms += expert_gemms(workload) + mlp_gemms(workload, workload.model.shared_ffn_hidden_size)
        if "mlp" in modules and not has_experts:
            gemms += mlp_gemms(workload, workload.model.ffn_hidden_size)
        return replace(layer, recompute=seconds + sum(matmul_s(self.gpu.matmul, *gemm) for gemm in gemms))

    def send_s(self, workload: PublishedWorkload, size_bytes: float, bytes_per_s: float) -> float:
        """Seconds to send activations to the next stage; a part from each tensor-parallel rank, gathered there."""
        pieces = workload.layout.tp if workload.execution.splits_transfers and not workload.layout.sp else 1
        return size_bytes / pieces / bytes_per_s + self.gpu.group(pieces, 1).all_gather_s(size_bytes)

    def with_offload(
        self, workload: PublishedWorkload, parameters: RankParameters, components: dict[str, float]
    ) -> dict[str, float]:
        """Optimizer state in host memory. Stepped there by Adam, which is bound by the host's memory (30 bytes a
        parameter), after gradients came over PCIe and before weights go back; or brought to the device, 24 bytes."""
        where, cluster = workload.execution.offload_optimizer, workload.cluster
        own = parameters.total / (workload.layout.dp * workload.layout.cp)
        pcie = pcie_bytes_per_s(cluster.gpu)
        if where == "device":
            return components | {"offload": 24.0 * own / pcie}
        if where == "host":
            return components | {
                "offload": cpu_adam_s(own * cluster.gpus_per_node) + 6.0 * own / pcie,
                "optimizer": 0.0,
            }
        return components
