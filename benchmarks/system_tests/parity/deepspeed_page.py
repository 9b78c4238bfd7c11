"""``docs/parity.md``: the tables of ``benchmarks.system_tests.parity.deepspeed`` as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from benchmarks.system_tests.parity.deepspeed_layouts import COLUMNS, ROWS, Bounds


class Measured(Protocol):
    """What a page says of a cell."""

    bounds: Bounds
    gradient: float
    loss: float
    norm: float
    seconds: float

    @property
    def agrees(self) -> bool:
        """Within its bounds."""


def page(measured: Mapping[tuple[str, str], Measured], steps: int, half: int) -> str:
    """Markdown. ``measured``: (row, column) or a resume's two rows → its figures."""
    table = {pair: cell for pair, cell in measured.items() if pair[1] in COLUMNS}
    resumes = {pair: cell for pair, cell in measured.items() if pair[1] not in COLUMNS}
    columns = [name for name in COLUMNS if any(column == name for _, column in table)]
    lines = [
        "# DeepSpeed parity",
        "",
        "Written by `python -m benchmarks.system_tests.parity.deepspeed --write docs/parity.md`. That each check "
        "can fail is shown",
        "by `--plant-all`, which plants faults (benchmarks/system_tests/parity/deepspeed_faults.py) and requires "
        "each to turn red.",
        "",
        "A tiny model on CPU processes over gloo, against plain transformers and torch's AdamW in one process: largest",
        "relative error of any parameter's gradient at step 1, and, after the slash, of any loss or gradient norm of",
        f"{steps} steps. Labels are masked, a different number in each sample, so that ranks and micro batches count",
        "unequal tokens; the learning rate changes at every step; gradients are clipped. *unequal rows*, *t5*, *bart*:",
        "rows or pairs of unequal length, each micro batch padded to its longest, against a reference that takes a row",
        "at a time and pads nothing. *wide*: matrices of 1 MiB a rank, the least that goes to NVMe; files must have",
        "been there.",
        "",
        *_bounds(columns),
        "",
        f"| layout | processes | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for row in ROWS:
        cells = [table.get((row, column)) for column in columns]
        if any(cell is not None for cell in cells):
            lines.append(f"| {row} | {ROWS[row].world_size} | {' | '.join(map(_cell, cells))} |")
    agree = sum(cell.agrees for cell in table.values())
    every = sum(len(row.columns) for row in ROWS.values())
    lines += [
        "",
        f"{len(table)} of {every} cells were run, {agree} agree. – is no cell: refused by the planner,",
        "or nothing that the row's other cells do not show.",
    ]
    lines.append("")
    if resumes:
        lines += _resumes(resumes, half)
    seconds = sum(cell.seconds for cell in measured.values())
    lines.append(f"{seconds / 60:.0f} minutes on two cores, which other work may have shared.")
    return "\n".join(lines) + "\n"


def _bounds(columns: list[str]) -> list[str]:
    lines = ["| column | Adam's epsilon | gradient | losses | norms |", "|---|---|---|---|---|"]
    for name in columns:
        column, bounds = COLUMNS[name], COLUMNS[name].bounds
        lines.append(f"| {name} | {column.eps:.0e} | {bounds.gradient:.0e} | {bounds.loss:.0e} | {bounds.norm:.0e} |")
    return lines


def _resumes(resumes: Mapping[tuple[str, str], Measured], half: int) -> list[str]:
    agree = sum(cell.agrees for cell in resumes.values())
    lines = [
        "## Through the hub",
        "",
        "`python -m benchmarks.system_tests.parity.deepspeed --resumes` runs these alone.",
        f"{half} steps on one layout, a hub checkpoint, {half} steps on another: largest relative error of loss and",
        "norm against plain torch that ran on without a break; 1e-05 is allowed. Masters and moments in the engine are",
        "those on disk bit for bit, and so is the count of Adam's steps.",
        "",
        "| trained on | went on as | loss | norm | state |",
        "|---|---|---|---|---|",
    ]
    for (before, after), cell in resumes.items():
        state = "exact" if cell.gradient == 0 else "**differs**"
        lines.append(
            f"| {before} | {after} | {_bold(cell.loss, cell.agrees)} | {_bold(cell.norm, cell.agrees)} | {state} |"
        )
    return [*lines, "", f"{len(resumes)} changes of layout, {agree} agree.", ""]


def _cell(cell: Measured | None) -> str:
    if cell is None:
        return "–"
    return _bold(cell.gradient, cell.agrees) + " / " + _bold(max(cell.loss, cell.norm), cell.agrees)


def _bold(error: float, agrees: bool) -> str:
    return f"{error:.0e}" if agrees else f"**{error:.0e}**"
