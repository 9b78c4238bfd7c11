"""A plan as one self-contained HTML page: first screen, compared layouts, memory, step time, reasons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from html import escape

from kit.planner.compare import ComparedLayout, compare
from kit.planner.request import Request
from kit.report.summary import summary
from kit.report.view import ENGINE_COLORS, ENGINE_NAMES, PART_COLORS, PlanView, spoken
from kit.report.what_if import explain, pinned
from kit.units import human_seconds

_COLUMNS = 84
"""Columns of text in the page."""
_WIDTH, _HEIGHT, _EDGE = 720, 340, 48
"""Sizes of the chart of layouts."""
_MOST_TICKS = 6
_SLOWEST = 3.0
"""Layouts that take longer than this many times the plan's step are left out of the chart."""
_STYLE = """
:root { color-scheme: light dark; } body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
padding: 0 1rem; } pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
.bar { display: flex; height: 1.4rem; margin: .2rem 0; }
.bar span { display: block; } .key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; }
svg { max-width: 100%; height: auto; } svg text { fill: currentColor; font-size: 12px; } circle:hover { stroke: red; }
"""


def page(view: PlanView) -> str:
    """The page's text. It loads nothing and runs no script."""
    plan, step = view.plan, view.step_s
    title = escape(f"{plan.model.name} on {plan.cluster.num_gpus} × {plan.cluster.gpu.name}")
    blocks = [
        f"<h1>{title}</h1><pre>{escape(summary(view, width=_COLUMNS))}</pre>",
        "<h2>Layouts that were compared</h2>" + _chart(view),
        "<h2>Memory of a GPU</h2>" + "".join(_memory(view)),
        "<h2>A step</h2>" + _bar(step, plan.predicted.step_time_s) + _keys(step, human_seconds),
        f"<h2>Why</h2><pre>{escape(str(explain(plan)))}</pre>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    html = f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>'
    return f"{html}{''.join(blocks)}</body></html>"


def _chart(view: PlanView) -> str:
    """SVG with a point per fitting layout: step time against memory, with a tooltip."""
    plan, usable = view.plan, view.usable_gib
    request = Request(model=plan.model, cluster=plan.cluster, job=plan.job, pins=pinned(plan))
    most_s = _SLOWEST * plan.predicted.step_time_s
    fitting = [each for each in compare(request).layouts if each.fits and each.step_time_s <= most_s]
    slowest = max((each.step_time_s for each in fitting), default=most_s)
    engines = list(dict.fromkeys(each.layout.engine for each in fitting))

    def point(each: ComparedLayout) -> str:
        x = _EDGE + (_WIDTH - 2 * _EDGE) * each.step_time_s / slowest
        y = _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * each.peak_gib / usable
        said = f"{spoken(each.name)}: {human_seconds(each.step_time_s)}, {each.peak_gib:.1f} GiB"
        colour = ENGINE_COLORS[each.layout.engine]
        own = ' stroke="currentColor" stroke-width="3"' if each.name == view.layout else ""
        circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" opacity="0.7"{own}>'
        return f"{circle}<title>{escape(said)}</title></circle>"

    axes = (
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">seconds a step</text>'
        f'<text x="12" y="{_HEIGHT / 2}" transform="rotate(-90 12 {_HEIGHT / 2})" text-anchor="middle">'
        f"GiB of a GPU</text>{_ticks(slowest, usable)}"
        f'<path d="M{_EDGE} {_EDGE}V{_HEIGHT - _EDGE}H{_WIDTH - _EDGE}" fill="none" stroke="currentColor"/>'
    )
    label = f"{len(fitting)} layouts that fit: time of a step against memory; the plan has a ring"
    drawn = "".join(map(point, fitting))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{axes}{drawn}</svg>'
        f"<p>{label}.{''.join(_key(ENGINE_COLORS[engine], ENGINE_NAMES[engine]) for engine in engines)}</p>"
    )


def _ticks(slowest: float, usable: float) -> str:
    """Round numbers at both axes."""
    xs = (
        f'<text x="{_EDGE + (_WIDTH - 2 * _EDGE) * number / slowest:.0f}" y="{_HEIGHT - _EDGE + 16}" '
        f'text-anchor="middle">{number:g}</text>'
        for number in _round_numbers(slowest)
    )
    ys = (
        f'<text x="{_EDGE - 6}" y="{_HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * number / usable + 4:.0f}" '
        f'text-anchor="end">{number:g}</text>'
        for number in _round_numbers(usable)
    )
    return "".join([*xs, *ys])


def _round_numbers(end: float) -> list[float]:
    """0 and the multiples up to ``end`` of a round step: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(end / _MOST_TICKS))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit * _MOST_TICKS >= end)
    return [round(step * index, 12) for index in range(math.floor(end / step) + 1)]


def _memory(view: PlanView) -> Iterator[str]:
    for number, stage in enumerate(view.plan.predicted.memory):
        named = {name: sizes[number] for name, sizes in view.memory_gib.items()}
        yield f"<p>Stage {stage.stage}: {stage.peak_gib:.1f} GiB of {view.limits}</p>"
        yield _bar(named, view.plan.cluster.gpu.memory_gib)
    yield _keys(named, lambda gib: f"{gib:.1f} GiB")


def _bar(sizes: Mapping[str, float], whole: float) -> str:
    parts = "".join(
        f'<span title="{escape(name)}" style="width: {size / whole:.2%}; background: {PART_COLORS[index % 10]}"></span>'
        for index, (name, size) in enumerate(sizes.items())
    )
    said = ", ".join(f"{name} {size / whole:.0%}" for name, size in sizes.items() if size > 0)
    return f'<div class="bar" role="img" aria-label="{escape(said)}">{parts}</div>'


def _keys(sizes: Mapping[str, float], show: Callable[[float], str]) -> str:
    """The legend of a bar: each colour's component, with its size."""
    named = zip(itertools.cycle(PART_COLORS), sizes.items())
    keys = (_key(colour, f"{name} {show(size)}") for colour, (name, size) in named if size > 0)
    return f"<p>{''.join(keys)}</p>"


def _key(colour: str, text: str) -> str:
    return f'<span class="key" style="background: {colour}"></span>{escape(text)}'
