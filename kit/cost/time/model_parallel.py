"""Seconds of a layer's collectives: tensor, context and expert parallelism, and what of them compute cannot hide."""

from __future__ import annotations

from typing import NamedTuple

from kit.cost.collectives import Group
from kit.cost.hardware import shared
from kit.cost.time.gpu import GpuPerf
from kit.cost.workload import Workload


class Exposed(NamedTuple):
    """Exposed seconds of a layer's collectives and micro batch."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.recompute


def _both_ways(workload: Workload, forward: float, backward: float) -> Exposed:
    """Full recompute repeats those of forward."""
    return Exposed(forward, backward, forward if workload.layout.recompute == "full" else 0.0)


def tensor_parallel(
    gpu: GpuPerf, workload: Workload, gemms_forward: float, gemms_backward: float, experts: bool
) -> Exposed:
    """Two all-reduces a layer forward, two backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    Sequence parallelism turns each into a reduce-scatter and an all-gather: the same volume, and one gather more in
    backward, for inputs that were not saved (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2). Experts of their
    own ranks (etp=1) leave the MLP out of it. ``gemms_forward`` and ``gemms_backward``: seconds of a layer's GEMMs.
    """
    layout, how = workload.layout, workload.execution
    if layout.tp == 1:
        return Exposed()
    group = gpu.group(layout.tp, 1)
    size = workload.tokens * workload.model.hidden_size * 2.0
    blocks = 1 if experts else 2
    one_way = blocks * group.all_reduce_s(size)
    regathered = blocks * group.all_gather_s(size) if layout.sp else 0.0
    hidden_forward = shared().overlap * gemms_forward if how.overlaps_tensor_parallel else 0.0
    hidden_backward = shared().overlap * gemms_backward if how.overlaps_tensor_gradients else 0.0
    return _both_ways(workload, _exposed(one_way, hidden_forward), _exposed(one_way + regathered, hidden_backward))


def context_parallel(gpu: GpuPerf, workload: Workload, attention_forward: float) -> Exposed:
    """Keys and values go round in pieces beside attention (p2p), are gathered first (all_gather), or queries, keys,
    values and results are exchanged for heads (a2a, DeepSpeed-Ulysses, arXiv 2309.14509). ``attention_forward``:
    seconds of attention."""
    model, layout = workload.model, workload.layout
    if layout.cp == 1:
        return Exposed()
    group = gpu.group(layout.cp, layout.tp)
    width = (model.query_width + model.value_width if model.latent else 2 * model.key_value_width) / layout.tp
    sequence = layout.micro_batch_size * workload.job.seq_length * 2.0
    if layout.cp_comm_type == "a2a":
        exchanged = (model.query_width + model.value_width) / layout.tp + width
        one_way = group.all_to_all_s(sequence / layout.cp * exchanged)
        return _both_ways(workload, one_way, one_way)
    one_way = group.all_gather_s(sequence * width)
    if layout.cp_comm_type == "all_gather":
        return _both_ways(workload, one_way, one_way)
    window = shared().overlap * attention_forward
    # In backward keys and values come once more, and their gradients with them.
    return _both_ways(workload, _exposed(one_way, window), _exposed(2 * one_way, 2.5 * window))


def expert_parallel(gpu: GpuPerf, workload: Workload, forward: float, backward: float) -> Exposed:
    """Tokens to their experts and back: two all-to-alls a layer, each way (megatron-core, moe/token_dispatcher.py).

    With tensor parallelism inside experts their ranks gather each other's tokens and scatter the sums. ``forward`` and
    ``backward``: seconds of the layer.
    """
    layout, experts_per_token = workload.layout, workload.model.experts_per_token
    sent = workload.tokens / layout.tp * workload.model.hidden_size * 2.0
    one_way = _dispatch_s(workload, gpu.group(layout.ep, layout.etp), sent)
    if layout.etp > 1:
        one_way += gpu.group(layout.etp, 1).all_gather_s(sent * experts_per_token * layout.etp)
    both = 2 * one_way
    repeated = both if layout.recompute == "full" or "moe" in workload.recompute_modules else 0.0
    if not workload.execution.overlaps_experts:
        return Exposed(both, both, repeated)
    overlap = shared().overlap
    return Exposed(_exposed(both, overlap * forward), _exposed(both, overlap * backward), repeated)


def _dispatch_s(workload: Workload, group: Group, token_bytes: float) -> float:
    """One all-to-all of a rank's tokens to the experts of each."""
    experts_per_token = workload.model.experts_per_token
    if group.size == 1:
        return 0.0
    if not workload.execution.once_per_node or group.nodes == 1:
        return group.all_to_all_s(token_bytes * experts_per_token)
    # A token crosses to each other node that has one of its experts, once.
    reached = (group.nodes - 1) * (1 - (1 - 1 / group.nodes) ** experts_per_token)
    across = token_bytes * reached / group.port_bytes_per_s
    inside = token_bytes * experts_per_token / group.inner_bytes_per_s
    return max(across, inside) + group.latency_s


def _exposed(seconds: float, window: float) -> float:
    """What is left beyond the window; some of every collective starts before there is compute to hide it under."""
    return max(seconds - window, shared().unhidden * seconds)
