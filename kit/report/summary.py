"""The output of ``kit plan``: a plan in about fifteen lines of plain words. ``kit explain`` has the details."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache

from kit.cost.hardware import usable_gib
from kit.cost.model.params import count
from kit.planner.describe import describe
from kit.planner.plan import Decision, Plan
from kit.report.plan_text import WIDTH, at_most, money, run_length, tokens_of, unknown_length
from kit.units import SECONDS_PER_DAY, human_count, human_seconds

_BAR = 28
"""Columns of a full GPU."""
LABEL_WIDTH = 12
"""Columns in front of a row's text."""
_ENGINES = {
    "torch": "PyTorch",
    "deepspeed": "DeepSpeed",
    "deepspeed over megatron": "DeepSpeed over Megatron-core",
    "megatron": "Megatron-core",
}
_RUNNER_UP = re.compile(r"(?P<layout>[^:]+): (?P<behind>[+-][\d.]+%), ")


def summary(
    plan: Plan, then: tuple[str, ...] = (), width: int = WIDTH, style: Callable[[str], str] = lambda label: label
) -> str:
    """The text, with lines of at most ``width`` columns. ``then``: next commands, which are never wrapped."""
    cluster, job = plan.cluster, plan.job
    node = f"{cluster.num_nodes} × {cluster.name}" if cluster.num_nodes > 1 else cluster.name
    title = (
        f"{plan.model.name} · {human_count(count(plan.model).total)} parameters · {cluster.num_gpus} × "
        f"{cluster.gpu.name} ({node}) · {job.precision} · {job.seq_length:,} tokens · "
        f"{job.global_batch_size:,} {job.rows} a step"
    )
    lines = [*textwrap.wrap(title, width, subsequent_indent="  "), ""]
    for label, text in _rows(plan):
        wrapped = textwrap.wrap(text, width - LABEL_WIDTH, break_long_words=False, break_on_hyphens=False)
        lines += _labelled(label, wrapped, style)
    return "\n".join([*lines, *_labelled("next", then, style)]).replace("\u00a0", " ")


@lru_cache(maxsize=8192)  # the page of kit ui asks it of every layout, and again after each change
def spoken(description: str) -> str:
    """``describe``'s line in the field's words: ``megatron, tp=2, sp`` → ``Megatron-core TP 2 + sequence parallel``."""
    engine, *parts = [part for part in description.split(", ") if part != "dp=1"]
    if "sp" in parts:
        parts.remove("sp")
        parts[0] += " + sequence parallel"
    text = re.sub(r"\b([a-z]{2,3})=(\d+)", lambda m: f"{m[1].upper()} {m[2]}", " · ".join(parts))
    text = re.sub(r"(DP \d+) · (?=ZeRO|FSDP2|DDP|distributed)", r"\1, ", text)
    text = text.replace("FSDP2 (zero_stage=2)", "FSDP2 (ZeRO-2)").replace("micro batch", "micro-batch")
    return f"{_ENGINES[engine]} " + re.sub(r"(?<=\d) x (?=\d)", "\u00a0×\u00a0", text)


def _labelled(label: str, lines: list[str] | tuple[str, ...], style: Callable[[str], str]) -> list[str]:
    heads = [style(f"  {label:<{LABEL_WIDTH - 2}}"), *[" " * LABEL_WIDTH] * len(lines)]
    return [head + line for head, line in zip(heads, lines, strict=False)]


_NOTES = ("last_resort", "model", "num_gpus", "seq_length", "precision", "optimizer", "tp_across_nodes", "extra")
"""Rules of decisions that a user must not miss."""


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted, full = plan.predicted, "" if plan.job.objective == "pretrain" else " in full sequences"
    yield "layout", spoken(describe(plan.layout))
    yield "memory", _memory(plan)
    if predicted.host_ram_gib_per_node:
        disks = f" and {predicted.nvme_gib_per_node:,.0f} GiB of NVMe" if predicted.nvme_gib_per_node else ""
        yield "host", f"{predicted.host_ram_gib_per_node:,.0f} GiB of host memory{disks} on every node"
    yield (
        "time",
        (
            f"{human_seconds(predicted.step_time_s)} a step ({_band(plan)}) · {human_count(predicted.tokens_per_s)} "
            f"tokens/s{full} · MFU {predicted.mfu:.1%}"
        ),
    )
    yield _length(plan), _total(plan)
    if others := [match for decision in plan.decisions if decision.rule == "engine" for match in _others(decision)]:
        yield "also", " · ".join(others)
    for decision in plan.decisions:
        if decision.rule in _NOTES:
            yield "note", f"{decision.rule}={decision.chosen}: {decision.why}"


def _length(plan: Plan) -> str:
    tokens = tokens_of(plan)
    return "length" if tokens is None else f"{human_count(tokens)} tok"


def _total(plan: Plan) -> str:
    """Time and money of the whole run; processes of a CPU are for tests, whose failures nobody has counted."""
    predicted = plan.predicted
    if plan.cluster.gpu.device == "cpu":
        days, stops = predicted.days, ""
    else:
        days, stops = predicted.total_days, " with checkpoints and failures"
    if days is None:
        return unknown_length(plan)
    if not math.isfinite(days):
        return "never: checkpoints and failures leave no time for training"
    what = "" if plan.job.objective == "pretrain" and tokens_of(plan) else f"{run_length(plan)}: {at_most(plan)}"
    return f"{what}{human_seconds(days * SECONDS_PER_DAY)}{stops} · {money(plan.cluster, days)}"


def _memory(plan: Plan) -> str:
    """A bar over the whole GPU: used memory, free memory, and the margin for CUDA and the allocator."""
    gpu, peak = plan.cluster.gpu, plan.predicted.peak_gib
    scale = _BAR / gpu.memory_gib
    used, usable = round(peak * scale), round(usable_gib(gpu) * scale)
    bar = ("█" * used).ljust(usable, "░").ljust(_BAR, "·")
    band = plan.predicted.memory_band
    checked = "not measured yet" if band is None else f"± {band:.0%}"
    return f"{bar} {peak:.1f} of {usable_gib(gpu):.1f} GiB usable ({gpu.memory_gib:.1f} total; {checked})"


def _band(plan: Plan) -> str:
    predicted = plan.predicted
    if predicted.step_time_band is not None:
        return f"± {predicted.step_time_band:.0%}"
    similar = re.search(r"± \d+%", predicted.step_time_evidence)
    return f"{similar[0]} for similar code" if similar else "no published run to compare with"


def _others(decision: Decision) -> Iterator[str]:
    """The best layout of each other engine, and by how much its step is longer."""
    for text in decision.rejected:
        if match := _RUNNER_UP.match(text):
            parts = [part for part in match["layout"].split(", ") if not part.startswith(("dp=", "micro batch", "vp="))]
            yield f"{spoken(', '.join(parts)).replace(' ·', '')} {match['behind']}"
