"""Seconds of what data-parallel ranks exchange: gradients out, weights in, and what of it no compute hides."""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost.hardware import shared
from kit.cost.model.compression import (
    DEQUANTISE_BYTES,
    INT4_BYTES,
    INT8_BYTES,
    QUANTISE_GRADIENT_BYTES,
    ZeroPlusPlus,
)
from kit.cost.model.lora import trained_share
from kit.cost.model.params import RankParameters
from kit.cost.setup import TrainingSetup
from kit.cost.time.collectives import Group
from kit.cost.time.gpu import Machine


def data_parallel_s(
    machine: Machine, setup: TrainingSetup, held: RankParameters, forward: float, backward: float
) -> float:
    """Exposed seconds of a step; ``forward`` and ``backward`` are those of one micro batch on a rank."""
    ranks = machine.group(setup.dp * setup.cp, setup.tp)
    expert_ranks = machine.group(expert_dp(setup), setup.ep * setup.etp)
    if ranks.size == 1 and expert_ranks.size == 1:
        return 0.0
    trained = trained_share(setup.adapters, held)
    if setup.sharding == "full" or (setup.sharding == "gradients" and setup.program.engine == "fsdp"):
        return _fully_sharded(machine, setup, held, ranks, expert_ranks, forward, backward)
    sixteen = 2.0 if setup.program.precision != "fp32" else 4.0
    reduced = trained * _gather_s(ranks, expert_ranks, held, setup.program.gradient_bytes)
    weights = trained * _gather_s(ranks, expert_ranks, held, sixteen)
    if setup.program.engine == "deepspeed":
        return _deepspeed(setup, reduced, weights, backward)
    reduction = reduced * (1 if setup.sharding == "optimizer" and not setup.program.reduces_in_full else 2)
    gathered = weights if setup.sharding == "optimizer" else 0.0
    compressed = setup.program.gradient_kernel_bytes * (held.dense + held.experts) / machine.bytes_per_s
    if not setup.program.overlaps_gradients:
        return reduction + gathered + compressed
    return exposed(reduction, backward) + exposed(gathered, forward) + compressed


def expert_dp(setup: TrainingSetup) -> int:
    """Ranks that hold the same experts."""
    return max(1, setup.dp * setup.cp * setup.tp // (setup.ep * setup.etp))


def _gather_s(ranks: Group, expert_ranks: Group, held: RankParameters, width: float, messages: int = 1) -> float:
    """An all-gather, or as long, a reduce-scatter of everything that a rank holds."""
    dense = ranks.all_gather_s(width * held.dense, messages)
    return dense + (expert_ranks.all_gather_s(width * held.experts, messages) if held.experts else 0.0)


def _fully_sharded(
    machine: Machine,
    setup: TrainingSetup,
    held: RankParameters,
    ranks: Group,
    experts: Group,
    forward: float,
    backward: float,
) -> float:
    """FSDP and ZeRO-3 gather layer by layer, beside the layer before: for forward, and where weights were dropped after
    it, for backward; gradients leave at the end of each micro batch (FSDP2 and ZeRO-3), in fp32 under FSDP2."""
    # In a pipeline weights are gathered, and sums of gradients scattered, once a step (arXiv 2407.21783, 3.3.2).
    m = setup.micro_batches if setup.pp == 1 or setup.sharding == "full" else 1
    # DeepSpeed gathers module by module: norms, projections, both halves of the MLP.
    layers = setup.shape.num_layers * (6 if setup.program.engine == "deepspeed" else 1)
    width = 1.0 if setup.fp8 is not None and not setup.fp8.keeps_bf16_weights else 2.0
    width = 4.0 if setup.program.precision == "fp32" else width
    gather = first = _gather_s(ranks, experts, held, width, layers)
    scatter = _gather_s(ranks, experts, held, setup.program.gradient_bytes, layers)
    if setup.program.zero_plus_plus is not None:
        times = zero_times(machine, setup.program.zero_plus_plus, ranks.size, held.dense + held.experts, width, layers)
        first, gather, scatter = times.first_gather, times.gather, times.scatter
    again = gather if setup.sharding == "full" and not setup.program.keeps_gathered else 0.0
    back = again + trained_share(setup.adapters, held) * scatter
    floor = setup.program.unhidden_sharding
    forwards = [max(exposed(each, forward), floor * each) for each in (first, gather)]
    return forwards[0] + (m - 1) * forwards[1] + m * max(exposed(back, backward), floor * back)


def _deepspeed(setup: TrainingSetup, reduced: float, gathered: float, backward: float) -> float:
    """Stage 2 reduces in each micro batch; stages 0 and 1 at the end of the last one, and stages from 1 on gather the
    weights after the step, when nothing is left to hide them (runtime/zero/stage_1_and_2.py)."""
    if setup.sharding == "gradients":
        return setup.micro_batches * exposed(reduced, backward) + gathered
    if setup.sharding == "optimizer":
        return (exposed(reduced, backward) if setup.micro_batches == 1 else reduced) + gathered
    return 2 * reduced


def exposed(seconds: float, window: float) -> float:
    """What is left beyond the share of a window under which it can hide."""
    return max(seconds - shared().overlap * window, shared().unhidden * seconds)


@dataclass(frozen=True)
class ZeroTimes:
    """Seconds of one micro batch's exchanges at stage 3."""

    first_gather: float
    """Gather in the forward pass of a step's first micro batch."""
    gather: float
    """Gather in every other pass."""
    scatter: float


def zero_times(
    machine: Machine, chosen: ZeroPlusPlus, ranks: int, parameters: float, width: float, messages: int
) -> ZeroTimes:
    """Times for ``parameters`` elements of ``width`` bytes over ``ranks`` neighbours, in so many collectives."""
    everywhere = machine.group(ranks, 1)
    each = INT8_BYTES if chosen.weights else width
    kernels = DEQUANTISE_BYTES * parameters / machine.bytes_per_s if chosen.weights else 0.0
    first = everywhere.all_gather_s(each * parameters, messages) + kernels
    near = machine.group(chosen.hpz, 1) if chosen.hpz > 1 else everywhere
    gather = near.all_gather_s(each * parameters, messages) + kernels
    if not chosen.gradients:
        return ZeroTimes(first, gather, everywhere.all_gather_s(width * parameters, messages))
    node = machine.cluster.gpus_per_node
    inside = machine.group(min(node, ranks), 1).all_gather_s(INT4_BYTES * parameters, messages)
    between = machine.group(max(1, ranks // node), node).all_gather_s(INT4_BYTES * parameters / node, messages)
    return ZeroTimes(first, gather, inside + between + QUANTISE_GRADIENT_BYTES * parameters / machine.bytes_per_s)
