"""Sentences that explain a memory report: bytes per parameter, ZeRO-3 compared with ZeRO-2, recompute, loading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kit.cost.memory.deepspeed_sizes import buffer_sizes
from kit.cost.memory.offload import host_load_gib_per_node, host_ram_gib_per_node
from kit.cost.memory.peak import MemoryReport, parts_of, peak
from kit.cost.memory.states_and_buffers import engine_memory, rank_states
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.planner.rules import violations
from kit.specs.layout import Recompute
from kit.units import human_count, to_gib

_ZERO_PAPER = 16.0
"""Bytes per parameter: 2 of weights, 2 of gradients, 12 of fp32 master weights and two moments (arXiv 1910.02054)."""
_LITTLE = 0.1
"""Share of saved activations below which recompute saves little."""


def memory_reasons(w: Workload, memory: MemoryReport) -> tuple[str, ...]:
    """Sentences about one layout and its memory."""
    fullest = max(memory.stages, key=lambda stage: stage.peak_gib).stage
    return (_states(w, fullest), *_zero_3_beside_2(w), *_recompute(w, fullest), *_loading(w))


def _states(w: Workload, stage: int) -> str:
    """``weights 2 + gradients 2 + optimizer 12 = 16 bytes x 70.6B parameters = 1,051 GiB``: the unsharded states."""
    sizes: dict[str, Any] = dict.fromkeys(("dp", "tp", "pp", "vp", "cp", "ep", "etp", "zero_hpz"), 1)
    ends = {"sp": False, "first_stage_layers": None, "last_stage_layers": None}
    alone = w.with_layout(w.layout.but(**sizes, **ends, offload_optimizer="none", offload_param="none"))
    whole = rank_states(engine_memory(alone), alone.parameters[0], 0)
    parameters = float(count(w.model).total)
    parts = (whole.weights, whole.gradients, whole.optimizer)
    per = [part / parameters for part in parts]
    own = rank_states(engine_memory(w), w.parameters[stage], stage)
    held = to_gib(own.weights + own.gradients + own.optimizer)
    kinds = zip(("weights", "gradients", "optimizer"), per, strict=True)
    line = (
        f"states: {' + '.join(f'{name} {each:.3g}' for name, each in kinds)} = {sum(per):.3g} bytes x "
        f"{human_count(parameters)} parameters = {to_gib(sum(parts)):,.0f} GiB; a GPU holds {held:,.1f} GiB of them"
    )
    if w.job.lora is not None:
        return f"{line}. Weights are frozen: the adapters alone have gradients and optimizer state"
    if w.job.precision == "bf16" and sum(per) > _ZERO_PAPER:
        whole_gib = to_gib(_ZERO_PAPER * parameters)
        summed = "is the sum with gradients in bf16; here they are summed in fp32"
        line += f". {_ZERO_PAPER:.0f} bytes ({whole_gib:,.0f} GiB) {summed}"
    return line


def _zero_3_beside_2(w: Workload) -> list[str]:
    """Compares ZeRO-2 and ZeRO-3 of a DeepSpeed layout that could have either."""
    layout = w.layout
    if layout.engine != "deepspeed" or layout.zero_stage < 2 or layout.dp * layout.cp == 1 or layout.uses_nvme:
        return []
    second = replace(layout, zero_stage=2, offload_param="none", zero_hpz=1)
    third = replace(layout, zero_stage=3)
    (two,), (three,) = (peak(w.with_layout(each)).stages for each in (second, third))
    sizes = buffer_sizes(w.model, w.cluster, third)
    live, prefetch = sizes["stage3_max_live_parameters"], sizes["stage3_prefetch_bucket_size"]
    moved = ", ".join(
        f"{name} {two.components_gib[name]:.1f} -> {three.components_gib[name]:.1f}" for name in ("weights", "buffers")
    )
    line = (
        f"ZeRO-3 instead of ZeRO-2: peak {two.peak_gib:.1f} -> {three.peak_gib:.1f} GiB ({moved}). ZeRO-3 shards "
        f"weights and gathers them to compute: up to {human_count(live)} live parameters, {human_count(prefetch)} "
        f"prefetched, and a reduce bucket of {human_count(sizes['reduce_bucket_size'])}"
    )
    if three.peak_gib > two.peak_gib:
        line += ". That is more than sharding saves here; a smaller stage3_max_live_parameters lowers it"
    return [line]


def _recompute(w: Workload, stage: int) -> list[str]:
    """Activation memory that each kind of recompute saves, over all micro batches in flight."""
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    each = {kind: w.with_layout(replace(w.layout, recompute=kind)) for kind in kinds}
    kept = {
        kind: to_gib(parts_of(work, stage).saved_activations)
        for kind, work in each.items()
        if "selective_recompute" not in {violation.rule for violation in violations(work)}
    }
    figures = ", ".join(f"{kind} {size:.1f}" for kind, size in kept.items())
    line = f"activations saved for backward, GiB by recompute: {figures}"
    by_module = w.layout.implementation != "huggingface" and w.attention != "unfused" and "selective" in kept
    if by_module and kept["none"] - kept["selective"] < _LITTLE * kept["none"]:
        line += f". Selective recompute drops attention's scores; {w.attention} attention never stores them"
    return [line]


def _loading(w: Workload) -> list[str]:
    """Host memory of DeepSpeed's stage 3, with ``zero.Init`` and without (runtime/zero/partition_parameters.py)."""
    layout = w.layout
    if layout.engine != "deepspeed" or layout.zero_stage < 3 or layout.implementation != "huggingface":
        return []
    ranks, element = layout.world_size // w.cluster.num_nodes, w.weight_bytes
    whole = to_gib(element * count(w.model).total)
    offloaded = ", offloaded state included" if host_ram_gib_per_node(w) else ""
    return [
        f"loading: with zero.Init a process builds one weight at a time, {host_load_gib_per_node(w):,.0f} GiB of host "
        f"memory a node{offloaded}; without it each process builds the whole model, {ranks} x {whole:,.0f} = "
        f"{ranks * whole:,.0f} GiB at {element} bytes a parameter"
    ]
