"""The output of ``kit plan``: a plan in about fifteen lines of plain words. ``kit explain`` has the details."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from kit.planner.plan import Plan
from kit.report.view import WIDTH, PlanView, at_most, money, run_length, tokens_of
from kit.units import SECONDS_PER_DAY, human_count, human_seconds

_BAR = 28
"""Columns of a full GPU."""
LABEL_WIDTH = 12
"""Columns in front of a row's text."""


def summary(
    view: PlanView, then: tuple[str, ...] = (), width: int = WIDTH, style: Callable[[str], str] = lambda label: label
) -> str:
    """The text, with lines of at most ``width`` columns. ``then``: next commands, which are never wrapped."""
    plan, job = view.plan, view.plan.job
    title = (
        f"{plan.model.name} · {view.parameters} parameters · {view.method} · {plan.cluster.num_gpus} × "
        f"{plan.cluster.gpu.name} ({view.nodes}) · {job.precision} · {job.seq_length:,} tokens · "
        f"{job.global_batch_size:,} {job.rows} a step"
    )
    lines = [*textwrap.wrap(title, width, subsequent_indent="  "), "", *wrapped(_rows(view), width, style)]
    return "\n".join([*lines, *labelled("next", then, style)]).replace("\u00a0", " ")


def wrapped(rows: Iterable[tuple[str, str]], width: int, style: Callable[[str], str]) -> list[str]:
    """The lines of rows, each of a label and a text, of at most ``width`` columns."""
    wrap = partial(textwrap.wrap, width=width - LABEL_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [line for label, text in rows for line in labelled(label, wrap(text), style)]


def labelled(label: str, lines: list[str] | tuple[str, ...], style: Callable[[str], str]) -> list[str]:
    """A row's lines behind its label."""
    heads = [style(f"  {label:<{LABEL_WIDTH - 2}}"), *[" " * LABEL_WIDTH] * len(lines)]
    return [head + line for head, line in zip(heads, lines, strict=False)]


def _rows(view: PlanView) -> Iterator[tuple[str, str]]:
    plan = view.plan
    predicted, full = plan.predicted, "" if plan.job.objective == "pretrain" else " in full sequences"
    if plan.model.is_text_part:
        yield "model", "the text part alone: towers for images and sound are left out, also of the exported model"
    yield "layout", view.words
    yield "memory", _memory(view)
    if predicted.host_ram_gib_per_node:
        disks = f" and {predicted.nvme_gib_per_node:,.0f} GiB of NVMe" if predicted.nvme_gib_per_node else ""
        yield "host", f"{predicted.host_ram_gib_per_node:,.0f} GiB of host memory{disks} on every node"
    yield (
        "time",
        (
            f"{human_seconds(predicted.step_time_s)} a step ({view.step_band}) · {human_count(predicted.tokens_per_s)} "
            f"tokens/s{full} · MFU {predicted.mfu:.1%}"
        ),
    )
    yield _length(plan), _total(plan)
    if view.alternatives:
        yield "also", " · ".join(view.alternatives)
    for note in view.notes:
        yield "note", f"{note.rule}={note.chosen}: {note.why}"


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
    assert days is not None, "a view's plan has a length"
    if not math.isfinite(days):
        return "never: checkpoints and failures leave no time for training"
    rows = plan.job.objective != "pretrain"
    what = ("in full sequences: " if rows else "") if tokens_of(plan) else f"{run_length(plan)}: {at_most(plan)}"
    return f"{what}{human_seconds(days * SECONDS_PER_DAY)}{stops} · {money(plan.cluster, days)}"


def _memory(view: PlanView) -> str:
    """A bar over the whole GPU: used memory, free memory, and the margin for CUDA and the allocator. It is full where
    another trainer's file needs more."""
    whole, peak, band = view.plan.cluster.gpu.memory_gib, view.plan.predicted.peak_gib, view.plan.predicted.memory_band
    used, usable = min(_BAR, round(_BAR * peak / whole)), round(_BAR * view.usable_gib / whole)
    bar = ("█" * used).ljust(usable, "░").ljust(_BAR, "·")
    checked = "not measured yet" if band is None else f"± {band:.0%}"
    return f"{bar} {peak:.1f} of {view.usable_gib:.1f} GiB usable ({whole:.1f} total; {checked})"
