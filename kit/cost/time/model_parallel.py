"""Seconds of a layer's exchanges: tensor, context and expert parallelism, and what of them compute cannot hide."""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost.hardware import shared
from kit.cost.setup import Program, TrainingSetup
from kit.cost.time.collectives import Group
from kit.cost.time.gpu import Machine
from kit.cost.time.layer import LayerTime


@dataclass(frozen=True)
class Exchange:
    """Exposed seconds of a layer and micro batch."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    """Time in recomputation."""

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.again


def tensor_parallel(machine: Machine, setup: TrainingSetup, layer: LayerTime, experts: bool) -> Exchange:
    """Two all-reduces a layer forward, two backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    Sequence parallelism turns each into a reduce-scatter and an all-gather: the same volume, and one gather more in
    backward, for inputs that were not kept (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2). Experts of their
    own ranks (etp=1) leave the MLP out of it.
    """
    if setup.tp == 1:
        return Exchange()
    group = machine.group(setup.tp, 1)
    size = setup.tokens * setup.shape.hidden_size * 2.0
    blocks = 1 if experts else 2
    one_way = blocks * group.all_reduce_s(size)
    regathered = blocks * group.all_gather_s(size) if setup.sp else 0.0
    hidden_forward = shared().overlap * layer.products_forward if setup.program.overlaps_tensor_parallel else 0.0
    hidden_backward = shared().overlap * layer.products_backward if setup.program.overlaps_tensor_gradients else 0.0
    forward = _exposed(one_way, hidden_forward)
    return Exchange(
        forward=forward,
        backward=_exposed(one_way + regathered, hidden_backward),
        again=forward if setup.recompute == "full" else 0.0,
    )


def context_parallel(machine: Machine, setup: TrainingSetup, layer: LayerTime) -> Exchange:
    """Keys and values go round in pieces beside attention (p2p), are gathered first (all_gather), or queries, keys,
    values and results are exchanged for heads (a2a, DeepSpeed-Ulysses, arXiv 2309.14509)."""
    if setup.cp == 1:
        return Exchange()
    shape = setup.shape
    group = machine.group(setup.cp, setup.tp)
    width = (shape.query_width + shape.value_width if shape.latent else 2 * shape.key_value_width) / setup.tp
    sequence = setup.micro_batch_size * setup.seq_length * 2.0
    if setup.exchange == "a2a":
        exchanged = (shape.query_width + shape.value_width) / setup.tp + width
        one_way = group.all_to_all_s(sequence / setup.cp * exchanged)
        return Exchange(forward=one_way, backward=one_way, again=one_way if setup.recompute == "full" else 0.0)
    one_way = group.all_gather_s(sequence * width)
    if setup.exchange == "all_gather":
        return Exchange(forward=one_way, backward=one_way, again=one_way if setup.recompute == "full" else 0.0)
    window = shared().overlap * layer.attention_forward
    forward = _exposed(one_way, window)
    # Keys and values come again, and their gradients with them.
    return Exchange(
        forward=forward,
        backward=_exposed(2 * one_way, 2.5 * window),
        again=forward if setup.recompute == "full" else 0.0,
    )


def expert_parallel(machine: Machine, setup: TrainingSetup, layer: LayerTime) -> Exchange:
    """Tokens to their experts and back: two all-to-alls a layer, each way (megatron-core, moe/token_dispatcher.py).

    With tensor parallelism inside experts their ranks gather each other's tokens and scatter the sums.
    """
    moe = setup.shape.experts
    if moe is None:
        return Exchange()
    group = machine.group(setup.ep, setup.etp)
    sent = setup.tokens / setup.tp * setup.shape.hidden_size * 2.0
    one_way = dispatch_s(setup.program, group, sent, moe.experts_per_token)
    if setup.etp > 1:
        one_way += machine.group(setup.etp, 1).all_gather_s(sent * moe.experts_per_token * setup.etp)
    both = 2 * one_way
    if setup.program.overlaps_experts:
        forward = _exposed(both, shared().overlap * layer.forward)
        backward = _exposed(both, shared().overlap * layer.backward)
    else:
        forward = backward = both
    repeated = setup.recompute == "full" or "moe" in setup.recompute_modules
    return Exchange(forward=forward, backward=backward, again=both if repeated else 0.0)


def dispatch_s(program: Program, group: Group, token_bytes: float, experts_per_token: int) -> float:
    """One all-to-all of a rank's tokens to the experts of each."""
    if group.size == 1:
        return 0.0
    if not program.once_per_node or group.nodes == 1:
        return group.all_to_all_s(token_bytes * experts_per_token)
    # A token crosses to each other node that has one of its experts, once.
    reached = (group.nodes - 1) * (1 - (1 - 1 / group.nodes) ** experts_per_token)
    across = token_bytes * reached / group.port_bytes_per_s
    inside = token_bytes * experts_per_token / group.inner_bytes_per_s
    return max(across, inside) + group.latency_s


def _exposed(seconds: float, window: float) -> float:
    """What is left beyond the window; some of every exchange starts before there is compute to hide it under."""
    return max(seconds - window, shared().unhidden * seconds)
