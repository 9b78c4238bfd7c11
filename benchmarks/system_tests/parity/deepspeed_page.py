"""``docs/parity.md``: the tables of ``benchmarks.system_tests.parity.deepspeed`` as a page."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.page import header, table
from benchmarks.system_tests.parity.deepspeed_layouts import COLUMNS, ROWS, Cell


def page(measured: Mapping[tuple[str, str], Cell], steps: int, half: int) -> str:
    """Markdown. ``measured``: (row, column) or a resume's two rows → its figures."""
    cells_of = {pair: cell for pair, cell in measured.items() if pair[1] in COLUMNS}
    resumes = {pair: cell for pair, cell in measured.items() if pair[1] not in COLUMNS}
    columns = [name for name in COLUMNS if any(column == name for _, column in cells_of)]
    lines = [
        header("DeepSpeed parity", "make prove NAME=parity-deepspeed"),
        "That each check can fail is shown by faults (benchmarks/system_tests/parity/deepspeed_faults.py), each of",
        "which must turn one red.",
        "",
        "A tiny model on CPU processes over gloo, against plain transformers and torch's AdamW in one process: largest",
        "relative error of any parameter's gradient at step 1, and, after the slash, of any loss or gradient norm of",
        f"{steps} steps. Labels are masked, a different number in each sample, so that ranks and micro batches count",
        "unequal tokens; the learning rate changes at every step; gradients are clipped. *unequal rows*, *t5*, *bart*:",
        "rows or pairs of unequal length, each micro batch padded to its longest, against a reference that takes a row",
        "at a time and pads nothing. *wide*: matrices of 1 MiB a rank, the least that goes to NVMe; files must have",
        "been there.",
        "",
        _bounds(columns),
        "",
    ]
    rows = []
    for name in ROWS:
        cells = [measured.get((name, column)) for column in columns]
        if any(cells):
            rows.append((name, ROWS[name].world_size, *map(_cell, cells)))
    lines.append(table(("layout", "processes", *columns), rows))
    agree = sum(cell.agrees for cell in cells_of.values())
    every = sum(len(row.columns) for row in ROWS.values())
    lines += [
        "",
        f"{len(cells_of)} of {every} cells were run, {agree} agree. – is no cell: refused by the planner,",
        "or nothing that the row's other cells do not show.",
    ]
    lines.append("")
    if resumes:
        lines += _resumes(resumes, half)
    seconds = sum(cell.seconds for cell in measured.values())
    lines.append(f"{seconds / 60:.0f} minutes on two cores, which other work may have shared.")
    return "\n".join(lines) + "\n"


def _bounds(columns: list[str]) -> str:
    heads = ("column", "Adam's epsilon", "gradient", "losses", "norms")
    rows = []
    for name in columns:
        column, bounds = COLUMNS[name], COLUMNS[name].bounds
        rows.append((name, *(f"{each:.0e}" for each in (column.eps, bounds.gradient, bounds.loss, bounds.norm))))
    return table(heads, rows)


def _resumes(resumes: Mapping[tuple[str, str], Cell], half: int) -> list[str]:
    agree = sum(cell.agrees for cell in resumes.values())
    lines = [
        "## Through the exchange checkpoint",
        "",
        "`python -m benchmarks.system_tests.parity.deepspeed --resumes` runs these alone.",
        f"{half} steps on one layout, an exchange checkpoint, {half} steps on another: largest relative error of loss",
        "and norm against plain torch that ran on without a break; 1e-05 is allowed. Masters and moments in the engine",
        "are those on disk bit for bit, and so is the count of Adam's steps.",
        "",
    ]
    rows = [
        (
            before,
            after,
            _bold(cell.loss, cell.agrees),
            _bold(cell.norm, cell.agrees),
            "exact" if cell.gradient == 0 else "**differs**",
        )
        for (before, after), cell in resumes.items()
    ]
    lines.append(table(("trained on", "went on as", "loss", "norm", "state"), rows))
    return [*lines, "", f"{len(resumes)} changes of layout, {agree} agree.", ""]


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    return _bold(cell.gradient, cell.agrees) + " / " + _bold(max(cell.loss, cell.norm), cell.agrees)


def _bold(error: float, agrees: bool) -> str:
    return f"{error:.0e}" if agrees else f"**{error:.0e}**"
