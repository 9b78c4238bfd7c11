"""What the demo shows: claims as they are tested, and a page of all that was printed and of the curves: one HTML file.

A claim is a sentence, the command that shows it, the figure it gave, and whether that was enough.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table


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


def write(file: Path, console: Console, curves: Mapping[str, list[dict[str, Any]]]) -> None:
    """Write the page: the console's record, then the curves, title → metric rows; the first is the reference."""
    picture = io.StringIO()
    _curves(curves).savefig(picture, format="svg", metadata={"Date": None})
    svg = picture.getvalue().partition("<svg")[2]
    page = console.export_html(inline_styles=True)
    file.write_text(page.replace("</body>", f"<h2>Curves</h2><svg{svg}</body>"), encoding="utf-8")


def _curves(curves: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Losses on the left; on the right how far each lies from the reference, where agreement is visible at all."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
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
    return figure
