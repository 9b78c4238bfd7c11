"""A picture of predictions: predicted over measured, one panel an engine, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Pairs = Sequence[tuple[float, float]]
"""(measured, predicted), above 0."""
SIDE, EDGE, COLUMNS = 180, 34, 4
"""Pixels of a panel, around it for its labels, and panels in a line."""
MOST = 4.0
"""The panel ends where predicted is so many times measured, and at its inverse; what is beyond is drawn at its edge."""
DASHED = 1.15


def as_svg(points: Mapping[str, Pairs], unit: str) -> str:
    """``points``: engine → pairs. All panels have the same logarithmic axes."""
    measured = [pair[0] for pairs in points.values() for pair in pairs]
    span = math.floor(math.log10(min(measured))), math.ceil(math.log10(max(measured)))
    pitch, panels = SIDE + 2 * EDGE, []
    for number, (engine, pairs) in enumerate(sorted(points.items())):
        line, column = divmod(number, COLUMNS)
        place = f'<g transform="translate({EDGE + column * pitch} {EDGE + line * pitch})">'
        panels.append(f"{place}{_panel(engine, pairs, *span)}</g>")
    width, height = min(len(points), COLUMNS) * pitch, math.ceil(len(points) / COLUMNS) * pitch + 20
    caption = f"across: measured, in {unit}; up: predicted over measured; dashed: {DASHED - 1:.0%} off"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        *panels,
        f'<text x="{width / 2:g}" y="{height - 8}" text-anchor="middle">{caption}</text>',
        "</svg>\n",
    ])  # fmt: skip


def _panel(engine: str, pairs: Pairs, low: int, high: int) -> str:
    def across(measured: float) -> float:
        return SIDE * (math.log10(measured) - low) / (high - low)

    def up(ratio: float) -> float:
        return SIDE / 2 * (1 - math.log(min(max(ratio, 1 / MOST), MOST)) / math.log(MOST))

    lines = [
        f'<path d="M0 {up(ratio):.1f}H{SIDE}" stroke="#999"{dashes}/>'
        for ratio, dashes in ((1.0, ""), *((ratio, ' stroke-dasharray="3 3"') for ratio in (DASHED, 1 / DASHED)))
    ]
    ticks = [
        f'<text x="{across(10.0**power):.1f}" y="{SIDE + 14}" text-anchor="middle">{10.0**power:g}</text>'
        for power in range(low, high + 1)
    ]
    ticks += [
        f'<text x="-4" y="{up(ratio) + 4:.1f}" text-anchor="end">{ratio:g}</text>' for ratio in (0.25, 0.5, 1, 2, 4)
    ]
    dots = [
        f'<circle cx="{across(measured):.1f}" cy="{up(predicted / measured):.1f}" r="2.5" fill="#06c" '
        'fill-opacity=".4"/>'
        for measured, predicted in pairs
    ]
    frame = f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="#999"/>'
    title = (
        f'<text x="{SIDE / 2:g}" y="-8" text-anchor="middle" font-weight="bold">{escape(engine)}: {len(pairs)}</text>'
    )
    return "".join([frame, title, *ticks, *lines, *dots])
