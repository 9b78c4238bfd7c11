"""What the demo shows: claims as they are tested, and a page of claims, curves and plans: one HTML file, no script.

A claim is a sentence, the command that shows it, the figure it gave, and whether that was enough.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from kit.planner.plan import Plan
from kit.report.plan_text import render

matplotlib.use("svg")
import matplotlib.pyplot as plt  # the backend must be chosen first
from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2330 }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #d8dde6 }
td.holds { color: #1a7f37 } td.fails { color: #b42318; font-weight: bold }
pre { background: #f5f7fa; padding: 1rem; overflow: auto }
svg { max-width: 100%; height: auto }
"""


@dataclass(frozen=True)
class Claim:
    """One row of the closing table."""

    text: str
    command: str
    figure: str
    holds: bool


@dataclass
class Ledger:
    """Claims in the order they were tested; prints each as it comes."""

    console: Console
    claims: list[Claim] = field(default_factory=list)

    def add(self, text: str, command: str, figure: str, holds: bool) -> None:
        """Record and print a claim."""
        claim = Claim(text, command, figure, holds)
        self.claims.append(claim)
        mark = "[green]holds[/green]" if holds else "[bold red]FAILS[/bold red]"
        self.console.print(f"  {mark}  {text}: {figure}", highlight=False)

    def add_bound(self, text: str, command: str, worst: float, bound: float, detail: str) -> None:
        """Record a claim that an error stays within a bound. NaN does not."""
        self.add(text, command, f"{worst:.1e} ≤ {bound:.0e} ({detail})", worst <= bound)

    @property
    def all_hold(self) -> bool:
        """Whether nothing failed; an empty ledger proves nothing."""
        return bool(self.claims) and all(claim.holds for claim in self.claims)

    def table(self) -> Table:
        """The closing table."""
        table = Table(title="What the demo showed", show_lines=False)
        for column in ("claim", "command", "figure", ""):
            table.add_column(column, overflow="fold")
        for claim in self.claims:
            table.add_row(claim.text, claim.command, claim.figure, "holds" if claim.holds else "FAILS")
        return table


def write(
    file: Path, claims: Sequence[Claim], plans: Sequence[Plan], curves: Mapping[str, list[dict[str, Any]]]
) -> Path:
    """Write the page and return its path. ``curves``: title → metric rows; the first is the reference."""
    parts = ["<h1>From a model and some GPUs to a trained, exported model</h1>", _table(claims)]
    parts += ["<h2>Curves</h2>", _svg(_curves(curves))]
    for plan in plans:
        parts += [f"<h2>{html.escape(f'{plan.model.name} on {plan.cluster.num_gpus} × {plan.cluster.gpu.name}')}</h2>"]
        parts += [f"<pre>{html.escape(render(plan))}</pre>"]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kit demo</title><style>{STYLE}</style>'
    file.write_text(f"{head}{''.join(parts)}</html>", encoding="utf-8")
    return file


def _table(claims: Sequence[Claim]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(c.text)}</td><td><code>{html.escape(c.command)}</code></td>"
        f"<td>{html.escape(c.figure)}</td>"
        f'<td class="{"holds" if c.holds else "fails"}">{"holds" if c.holds else "fails"}</td></tr>'
        for c in claims
    )
    return f"<table><tr><th>claim</th><th>command</th><th>figure</th><th></th></tr>{rows}</table>"


def _curves(curves: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Losses on the left; on the right how far each lies from the reference, where agreement is visible at all."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    reference = {row["step"]: row["loss"] for row in next(iter(curves.values()))}
    for index, (title, rows) in enumerate(curves.items()):
        steps = [row["step"] for row in rows]
        left.plot(steps, [row["loss"] for row in rows], label=title, color=f"C{index}", linewidth=1.2)
        errors = [abs(row["loss"] / reference[row["step"]] - 1) for row in rows]
        if any(errors):
            right.semilogy(steps, [max(error, 1e-9) for error in errors], color=f"C{index}", linewidth=1.2)
    left.set(title="Training loss", xlabel="step", ylabel="nats per token")
    right.set(title="Distance from plain torch", xlabel="step", ylabel="relative difference of the loss")
    right.axhline(1e-3, color="grey", linestyle=":", linewidth=1)
    left.legend(fontsize=8)
    figure.tight_layout()
    return figure


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return "<svg" + buffer.getvalue().split("<svg", 1)[1]
