"""Charts of an answer as ECharts options (NiceGUI includes ECharts): plain values, without importing NiceGUI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kit.addons.ui.answer import Answer, ClusterCost, pareto_front
from kit.cost.hardware import usable_gib
from kit.report.view import ENGINE_COLORS, ENGINE_NAMES, PART_COLORS, PlanView, spoken
from kit.units import human_seconds

_GREY = "rgba(128,128,128,0.45)"
_MOST_MEMORY = 2.0
"""Layouts that take more than this many times a GPU's memory are drawn at this height."""
_MOST_TIME = 4.0
"""Layouts that take longer than this many times the fastest one are drawn there; their words say the time."""
_SHORT_DAYS = 3.0
"""Runs that take less are drawn in hours."""
_ROOM = 1.3
"""Factor beside the first and the last cluster, for half of a label."""
_LABELS = {"hideOverlap": True}
_DRAW_PASS = """(params, api) => {
  const [stage, start, end] = [api.value(0), api.value(1), api.value(2)];
  const from = api.coord([start, stage]), to = api.coord([end, stage]), height = api.size([0, 1])[1] * 0.86;
  return {type: 'rect', shape: {x: from[0], y: from[1] - height / 2, width: Math.max(1, to[0] - from[0] - 1), height},
          style: {fill: api.visual('color')}};
}"""


def drawn(answer: Answer) -> dict[str, dict[str, Any] | None]:
    """Name → chart; None where the answer has none."""
    view = answer.view
    return {
        "layouts": layouts(answer) if answer.comparison.layouts else None,
        "memory": memory(view) if view else None,
        "step": step(answer) if view else None,
        "schedule": schedule(answer) if answer.schedule() else None,
    }


def layouts(answer: Answer) -> dict[str, Any]:
    """A point for each layout: step time against memory; the Pareto front; the limit. A layout that does not fit is
    pale."""
    gpu = answer.recipe.cluster.gpu
    usable, top = usable_gib(gpu), _MOST_MEMORY * gpu.memory_gib
    slowest = _MOST_TIME * min(each.step_time_s for each in answer.comparison.layouts)
    chosen = answer.view and answer.view.layout
    series: list[dict[str, Any]] = [
        {
            "type": "scatter", "name": ENGINE_NAMES[engine], "symbolSize": 8, "color": color,
            "data": [
                {
                    "name": f"{spoken(each.name)}<br>{human_seconds(each.step_time_s)} a step, {each.peak_gib:.1f} GiB"
                    + ("" if each.fits else ", does not fit"),
                    "id": each.name,
                    "value": [min(each.step_time_s, slowest), min(each.peak_gib, top)],
                    "itemStyle": {"opacity": 0.75 if each.fits else 0.2},
                }
                for each in answer.comparison.layouts
                if each.layout.engine == engine
            ],
        }
        for engine, color in ENGINE_COLORS.items()
    ]  # fmt: skip
    series += [
        {
            "type": "line", "name": "Pareto front", "step": "end", "symbol": "none", "color": "#8a63d2",
            "data": [
                [min(each.step_time_s, slowest), each.peak_gib] for each in pareto_front(answer.comparison.layouts)
            ],
            "silent": True,
            "markLine": {
                "symbol": "none", "silent": True, "data": [{"yAxis": usable, "name": "limit"}],
                "lineStyle": {"color": "#d33"},
                "label": {"formatter": f"{usable:.1f} GiB usable", "position": "insideEndTop"},
            },
        },
        {
            "type": "scatter", "name": "the plan", "symbolSize": 18, "symbol": "circle", "silent": True,
            "itemStyle": {"color": "transparent", "borderColor": "#8a63d2", "borderWidth": 3},
            "data": [
                [min(each.step_time_s, slowest), each.peak_gib]
                for each in answer.comparison.layouts
                if each.name == chosen
            ],
        },
    ]  # fmt: skip
    fitting = sum(each.fits for each in answer.comparison.layouts)
    text = f"{len(answer.comparison.layouts)} layouts, {fitting} of them fit: step time against memory of a GPU"
    return _chart(text, series) | {
        "xAxis": _axis(
            "seconds a step", scale=True, max=_most(slowest, (e.step_time_s for e in answer.comparison.layouts))
        ),
        "yAxis": _axis("GiB of a GPU", max=_most(top, [usable, *(e.peak_gib for e in answer.comparison.layouts)])),
        "tooltip": {"trigger": "item", "formatter": "{b}"},
    }


def memory(view: PlanView) -> dict[str, Any]:
    """GiB of a GPU by component, a bar for each pipeline stage, with the limit."""
    components, usable, predicted = view.memory_gib, view.usable_gib, view.plan.predicted
    series: list[dict[str, Any]] = [
        {"type": "bar", "name": name, "stack": "memory", "data": [round(size, 3) for size in sizes]}
        for name, sizes in components.items()
    ]
    series[-1]["markLine"] = {
        "symbol": "none", "silent": True, "lineStyle": {"color": "#d33"},
        "data": [{"xAxis": usable}],
        "label": {"formatter": f"{usable:.1f} GiB usable", "position": "start", "align": "right"},
    }  # fmt: skip
    text = f"Memory of the fullest GPU: {predicted.peak_gib:.1f} of {usable:.1f} GiB; " + _listed(
        (name, f"{max(sizes):.1f} GiB") for name, sizes in components.items()
    )
    return _chart(text, series) | {
        "xAxis": _axis("GiB of a GPU", max=round(view.plan.cluster.gpu.memory_gib, 1)),
        "yAxis": {"type": "category", "data": [f"stage {each.stage}" for each in predicted.memory], "inverse": True},
    }


def step(answer: Answer) -> dict[str, Any]:
    """Step time by component."""
    parts = answer.step()
    series = [
        {"type": "bar", "name": name, "stack": "step", "data": [round(seconds, 5)]} for name, seconds in parts.items()
    ]
    text = "Time of a step: " + _listed((name, human_seconds(seconds)) for name, seconds in parts.items())
    return _chart(text, series) | {
        "xAxis": _axis("seconds of a step", max=round(sum(parts.values()), 4)),
        "yAxis": {"type": "category", "data": ["step"], "axisLabel": {"show": False}},
    }


def schedule(answer: Answer) -> dict[str, Any]:
    """The pipeline's schedule: a row for each stage, a block for each pass; gaps are idle time."""
    passes = answer.schedule()
    stages = max(each.stage for each in passes) + 1
    series = [
        {
            "type": "custom", "name": name, ":renderItem": _DRAW_PASS, "color": color, "encode": {"x": [1, 2], "y": 0},
            "data": [
                {
                    "name": f"{name} of micro batch {each.micro_batch + 1} on stage {each.stage}",
                    "value": [each.stage, each.start, each.end],
                }
                for each in passes
                if (each.backward, each.chunk % 2) == kind
            ],
        }
        for name, color, kind in (
            ("forward", "#5b9bd5", (False, 0)), ("forward, second chunk", "#9cc3e6", (False, 1)),
            ("backward", "#3c9a5f", (True, 0)), ("backward, second chunk", "#8fcfa6", (True, 1)),
        )
        if any((each.backward, each.chunk % 2) == kind for each in passes)
    ]  # fmt: skip
    bubble = answer.plan.predicted.bubble_fraction if answer.plan else 0.0
    text = f"Schedule of {stages} pipeline stages; each is idle for {bubble:.1%} of a step"
    return _chart(text, series) | {
        "xAxis": _axis("time, in forward passes of a chunk"),
        "yAxis": {"type": "category", "data": [f"stage {stage}" for stage in range(stages)], "inverse": True},
    }


def cost(points: Iterable[ClusterCost]) -> dict[str, Any]:
    """Cost against time, a point for each size of the cluster; without a price GPU-days stand for money."""
    found = sorted(points)
    priced = any(each.cost_usd is not None for each in found)
    rows = [(each, each.cost_usd if priced else each.days * each.num_gpus) for each in found]
    short = max(each.days for each in found) < _SHORT_DAYS
    name, factor = ("hours", 24) if short else ("days", 1)
    data = [
        {"name": _gpus(each), "value": [round(each.days * factor, 4), round(paid, 2)]}
        for each, paid in rows
        if paid is not None
    ]
    unit = "USD" if priced else "GPU-days; no price is known"
    text = "Time and cost by cluster: " + _listed(
        (_gpus(each), f"{each.days * factor:.1f} {name}" + ("" if paid is None else f", {paid:,.0f} {unit}"))
        for each, paid in rows
    )
    times = [each.days * factor for each in found]
    series = [
        {
            "type": "line", "name": "clusters", "color": "#2f7ed8", "symbolSize": 10, "data": data,
            "label": {"show": True, "formatter": "{b}", "position": "top"}, "labelLayout": {"hideOverlap": True},
        }
    ]  # fmt: skip
    # Twice the GPUs take half the time: on a logarithmic axis their labels have equal room.
    halves = {
        "type": "log", "logBase": 2, "min": min(times) / _ROOM, "max": max(times) * _ROOM,
        "axisLabel": {
            ":formatter": "value => Number(value.toPrecision(2))", **_LABELS, "showMinLabel": False,
            "showMaxLabel": False,
        },
    }  # fmt: skip
    return _chart(text, series) | {
        "legend": {"show": False},
        "xAxis": _axis(name) | halves,
        "yAxis": _axis(unit, scale=True),
    }


def _gpus(point: ClusterCost) -> str:
    return f"{point.num_gpus} GPU" + "s" * (point.num_gpus > 1)


def _most(limit: float, values: Iterable[float]) -> float:
    """End of an axis: a little beyond the largest value, at most at ``limit``."""
    return float(f"{min(limit, max(values)) * 1.03:.3g}")


def _listed(items: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {size}" for name, size in items)


def _axis(name: str, **more: Any) -> dict[str, Any]:
    line = {"splitLine": {"lineStyle": {"color": _GREY}}, "axisLine": {"lineStyle": {"color": _GREY}}}
    # The end of an axis is where the data ends, and no number to read.
    labels = {"axisLabel": {**_LABELS, "showMaxLabel": "max" not in more}}
    return {"type": "value", "name": name, "nameLocation": "middle", "nameGap": 28, **labels, **line, **more}


def _chart(text: str, series: list[dict[str, Any]]) -> dict[str, Any]:
    """What all charts share. ``text`` says to a screen reader what the chart shows."""
    return {
        "animation": False,
        "color": PART_COLORS,
        "aria": {"enabled": True, "label": {"description": text}},
        "legend": {"type": "scroll", "top": 0, "icon": "rect"},
        "grid": {"left": 64, "right": 24, "top": 40, "bottom": 48},
        "tooltip": {"trigger": "item"},
        "series": series,
    }
