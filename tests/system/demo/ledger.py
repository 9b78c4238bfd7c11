"""Claims as they are tested: a sentence, the command that shows it, the figure it gave, and whether that was enough."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table


class Ledger:
    """Claims in the order they were tested; prints each as it comes."""

    def __init__(self, console: Console) -> None:
        self.console, self.all_hold = console, True
        columns = (Column(head, overflow="fold") for head in ("claim", "command", "figure", ""))
        self.table = Table(*columns, title="What the demo showed", show_lines=False)

    def add(self, text: str, command: str, figure: str, holds: bool) -> None:
        """Record and print a claim."""
        self.all_hold &= holds
        self.table.add_row(text, command, figure, "holds" if holds else "FAILS")
        mark = "[green]holds[/green]" if holds else "[bold red]FAILS[/bold red]"
        self.console.print(f"  {mark}  {text}: {figure}", highlight=False)

    def add_bound(self, text: str, command: str, worst: float, bound: float, detail: str) -> None:
        """Record a claim that an error stays within a bound. NaN does not."""
        self.add(text, command, f"{worst:.1e} ≤ {bound:.0e} ({detail})", worst <= bound)
