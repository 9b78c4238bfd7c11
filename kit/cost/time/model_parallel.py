"""Exposed seconds of a layer's tensor-, context- and expert-parallel collectives."""

from __future__ import annotations

from typing import NamedTuple

from kit.cost.collectives import Group
from kit.cost.hardware import shared
from kit.cost.time.gpu import GpuPerf
from kit.cost.workload import Workload
from kit.specs.job import MLP_LAYERS


class Exposed(NamedTuple):
    """Exposed seconds of a layer's collectives for one micro batch: the time that no compute hides."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.recompute


def _both_ways(workload: Workload, forward: float, backward: float, of_modules: float = 0.0) -> Exposed:
    """Adds the recomputation's collectives: under full recompute, those of forward; ``of_modules``: those of the
    modules that selective recompute computes again."""
    return Exposed(forward, backward, forward if workload.layout.recompute == "full" else of_modules)


def tensor_parallel(
    gpu: GpuPerf, workload: Workload, gemms_forward: float, gemms_backward: float, experts: bool
) -> Exposed:
    """Two all-reduces a layer forward, two backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    Sequence parallelism replaces each by a reduce-scatter and an all-gather of the same volume. Backward needs one more
    all-gather, for inputs that were saved sharded (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2). A layer
    with experts has only the collectives of attention. ``gemms_forward``, ``gemms_backward``: seconds of its GEMMs.
    """
    layout, how = workload.layout, workload.execution
    if layout.tp == 1:
        return Exposed()
    group = gpu.group(layout.tp, 1)
    size = workload.tokens * workload.model.hidden_size * 2.0
    blocks = 1 if experts else 2
    one_way = blocks * group.all_reduce_s(size)
    if workload.job.lora is not None:  # between A and B, over one or three ranks (engines/megatron/adapters.py)
        adapted = blocks if MLP_LAYERS & workload.job.lora.layers else 1
        one_way += adapted * group.all_reduce_s(workload.tokens * 2 * workload.job.lora.rank * 2.0)
    regathered = blocks * group.all_gather_s(size) if layout.sp else 0.0
    hidden_forward = shared().overlap * gemms_forward if how.overlaps_tensor_parallel else 0.0
    hidden_backward = shared().overlap * gemms_backward if how.overlaps_tensor_gradients else 0.0
    forward, backward = _exposed(one_way, hidden_forward), _exposed(one_way + regathered, hidden_backward)
    of_mlp = 0.0 if experts or "mlp" not in workload.recompute_modules else forward / blocks
    return _both_ways(workload, forward, backward, of_mlp)


def context_parallel(gpu: GpuPerf, workload: Workload, attention_forward: float) -> Exposed:
    """Exposed seconds of context parallelism. p2p: a ring sends keys and values while attention computes. all_gather:
    keys and values are gathered before attention. a2a: all-to-alls trade the sequence split for a split of heads
    (DeepSpeed-Ulysses, arXiv 2309.14509). ``attention_forward``: seconds of attention in forward."""
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
    # Backward sends keys and values again, and their gradients.
    return _both_ways(workload, _exposed(one_way, window), _exposed(2 * one_way, 2.5 * window))


def expert_parallel(gpu: GpuPerf, workload: Workload, forward: float, backward: float) -> Exposed:
    """Exposed seconds of expert parallelism: two all-to-alls per layer (dispatch and combine), in forward and again in
    backward (megatron-core, moe/token_dispatcher.py).

    With tensor parallelism inside experts, its ranks also all-gather tokens and reduce-scatter outputs. ``forward``,
    ``backward``: seconds of the compute that can run meanwhile, where anything can.
    """
    layout, experts_per_token = workload.layout, workload.routed_per_token
    sent = workload.tokens / layout.tp * workload.model.hidden_size * 2.0
    one_way = _dispatch_s(workload, gpu.group(layout.ep, layout.etp), sent)
    one_way += gpu.group(layout.etp, 1).all_gather_s(sent * experts_per_token * layout.etp)
    both = 2 * one_way
    repeated = both if layout.recompute == "full" or "moe" in workload.recompute_modules else 0.0
    if not workload.execution.overlaps_experts:
        return Exposed(both, both, repeated)
    overlap = shared().overlap
    return Exposed(_exposed(both, overlap * forward), _exposed(both, overlap * backward), repeated)


def _dispatch_s(workload: Workload, group: Group, token_bytes: float) -> float:
    """Seconds of one all-to-all that sends each token to its experts. ``token_bytes``: bytes of a rank's tokens."""
    experts_per_token = workload.routed_per_token  # the others wait for the rank that receives the most
    if group.size == 1:
        return 0.0
    if not workload.execution.once_per_node or group.nodes == 1:
        return group.all_to_all_s(token_bytes * experts_per_token)
    # A token is sent once to each other node that has one of its experts.
    chosen = workload.model.experts_per_token
    reached = (group.nodes - 1) * (1 - (1 - 1 / group.nodes) ** chosen) * experts_per_token / chosen
    across = token_bytes * reached / group.port_bytes_per_s
    inside = token_bytes * experts_per_token / group.inner_bytes_per_s
    return max(across, inside) + group.latency_s


def _exposed(seconds: float, window: float) -> float:
    """Seconds of a collective that compute of ``window`` seconds cannot hide. A share of it is never hidden, because
    the collective starts before there is compute."""
    return max(seconds - window, shared().unhidden * seconds)
