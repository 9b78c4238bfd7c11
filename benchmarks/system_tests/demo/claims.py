"""A claim: a sentence, the command that shows it, the figure it gave, and whether that was enough."""

from __future__ import annotations

from dataclasses import dataclass, field

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
