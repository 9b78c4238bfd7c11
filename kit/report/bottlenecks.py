"""What limits a plan: shares of a step's time, of a GPU's memory and of a node's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kit.cost.hardware import usable_gib
from kit.planner.plan import Plan


@dataclass(frozen=True)
class Bottleneck:
    """One thing that limits a plan."""

    what: str
    share: float
    """Share of the step time, or of the memory."""
    words: str


def bottlenecks(plan: Plan) -> tuple[Bottleneck, ...]:
    """What takes time beside the work itself, the largest first; then memory."""
    layout, cluster = plan.layout, plan.cluster
    inside = cluster.gpus_per_node
    links = {
        "tensor_parallel": ("NVLink" if layout.tp <= inside else "fabric", "tensor-parallel collectives"),
        "context_parallel": ("NVLink" if layout.tp * layout.cp <= inside else "fabric", "context-parallel collectives"),
        "expert_parallel": ("NVLink" if layout.ep * layout.etp <= inside else "fabric", "tokens to experts and back"),
        "data_parallel": ("NVLink" if cluster.num_nodes == 1 else "fabric", "gradients and weights of replicas"),
        "pipeline_transfer": ("NVLink" if cluster.num_nodes == 1 else "fabric", "activations between stages"),
        "pipeline_bubble": ("bubble", "stages that wait for the first and last micro batches"),
        "compute": ("compute", "GEMMs, attention and element-wise operators"),
        "recompute": ("compute", "forward passes repeated to save memory"),
        "launch": ("host processor", "kernels launched more slowly than they run"),
        "offload": ("host memory and PCIe", "optimizer state and weights away from the GPU"),
        "optimizer": ("GPU memory bandwidth", "the optimizer's step"),
        "scoring": ("compute", "forwards without gradient of the model and its reference"),
        "generation": ("generation", "completions, a token at a time"),
    }
    step = plan.predicted.step_time_s
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, seconds in plan.predicted.step_time_components_s.items():
        if seconds > 0:
            what, words = links.get(name, (name, name))
            found[what].append((seconds / step, words))
    times = [
        Bottleneck(what, sum(share for share, _ in parts), ", ".join(words for _, words in parts))
        for what, parts in found.items()
    ]
    peak, usable = plan.predicted.peak_gib, usable_gib(cluster.gpu)
    memory = Bottleneck("memory", peak / usable, f"{peak:.1f} of {usable:.1f} GiB usable on a GPU")
    host = plan.predicted.host_ram_gib_per_node
    known = cluster.host_ram_gib
    hosts = [Bottleneck("host RAM", host / known, f"{host:.0f} of {known:.0f} GiB of a node")] if host and known else []
    return (*sorted(times, key=lambda limit: -limit.share), memory, *hosts)
