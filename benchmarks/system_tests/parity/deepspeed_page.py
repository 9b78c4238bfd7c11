"""``docs/parity.md``: the tables of ``benchmarks.system_tests.parity.deepspeed`` as a page."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.page import header, table
from benchmarks.system_tests.parity.cell import Cell
from benchmarks.system_tests.parity.deepspeed_layouts import COLUMNS, ROWS


def page(measured: Mapping[tuple[str, str], Cell], steps: int, half: int) -> str:
    """Markdown. ``measured``: (row, column) or a resume's two rows → its figures."""
    cells = {pair: cell for pair, cell in measured.items() if pair[1] in COLUMNS}
    resumes = {pair: cell for pair, cell in measured.items() if pair[1] not in COLUMNS}
    columns = [name for name in COLUMNS if any(column == name for _, column in cells)]
    rows = [
        (name, row.world_size, *(_cell(measured.get((name, column))) for column in columns))
        for name, row in ROWS.items()
        if any((name, column) in measured for column in columns)
    ]
    agree = sum(cell.agrees for cell in cells.values())
    every = sum(len(row.columns) for row in ROWS.values())
    return f"""{header("DeepSpeed parity", "make prove NAME=parity-deepspeed")}
That each check can fail is shown by faults (benchmarks/system_tests/parity/faults.py), each of
which must turn one red.

A tiny model on CPU processes over gloo, against plain transformers and torch's AdamW in one process: largest
relative error of any parameter's gradient at step 1, and, after the slash, of any loss or gradient norm of
{steps} steps. Labels are masked, a different number in each sample, so that ranks and micro batches count
unequal tokens; the learning rate changes at every step; gradients are clipped. *unequal rows*, *t5*, *bart*:
rows or pairs of unequal length, each micro batch padded to its longest, against a reference that takes a row
at a time and pads nothing. *wide*: matrices of 1 MiB a rank, the least that goes to NVMe; files must have
been there.

{_bounds(columns)}

{table(("layout", "processes", *columns), rows)}

{len(cells)} of {every} cells were run, {agree} agree. – is no cell: refused by the planner,
or nothing that the row's other cells do not show.

{_resumes(resumes, half) if resumes else ""}
{sum(cell.seconds for cell in measured.values()) / 60:.0f} minutes on two cores, which other work may have shared.
"""


def _bounds(columns: list[str]) -> str:
    rows = []
    for name in columns:
        column = COLUMNS[name]
        rows.append((name, *(f"{each:.0e}" for each in (column.eps, *column.bounds.values()))))
    return table(("column", "Adam's epsilon", "gradient", "losses", "norms"), rows)


def _resumes(resumes: Mapping[tuple[str, str], Cell], half: int) -> str:
    rows = [
        (*pair, _bold(cell, "loss"), _bold(cell, "norm"), "exact" if cell["gradient"] == 0 else "**differs**")
        for pair, cell in resumes.items()
    ]
    return f"""## Through the exchange checkpoint

`python -m benchmarks.system_tests.parity.deepspeed --resumes` runs these alone.
{half} steps on one layout, an exchange checkpoint, {half} steps on another: largest relative error of loss
and norm against plain torch that ran on without a break; 1e-05 is allowed. Masters and moments in the engine
are those on disk bit for bit, and so is the count of Adam's steps.

{table(("trained on", "went on as", "loss", "norm", "state"), rows)}

{len(resumes)} changes of layout, {sum(cell.agrees for cell in resumes.values())} agree.
"""


def _cell(cell: Cell | None) -> str:
    return "–" if cell is None else f"{_bold(cell, 'gradient')} / {_bold(cell, 'loss', 'norm')}"


def _bold(cell: Cell, *quantities: str) -> str:
    error = f"{max(cell[quantity] for quantity in quantities):.0e}"
    return error if cell.agrees else f"**{error}**"
