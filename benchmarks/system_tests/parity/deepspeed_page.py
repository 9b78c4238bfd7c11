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
A tiny model trains under DeepSpeed on CPU processes over gloo. The reference is plain transformers with torch's
AdamW in one process. A cell has the largest relative error of any parameter's gradient at step 1 and, after the
slash, of any loss or gradient norm of {steps} steps. A different number of labels is masked in each sample, so
ranks and micro batches count unequal tokens. The learning rate changes at every step, and gradients are clipped. In
*unequal rows*, *t5* and *bart* the rows or pairs have unequal lengths: each micro batch is padded to its longest
row, the reference computes one row at a time without padding. In *wide* the matrices have 1 MiB a rank, the least
that DeepSpeed swaps to NVMe, and the comparison checks that swap files existed. Planted faults show that each check
can fail (benchmarks/system_tests/parity/faults.py).

{_bounds(columns)}

{table(("layout", "processes", *columns), rows)}

{len(cells)} of {every} cells were run, {agree} agree. – means that the planner refuses the combination, or that it
would show nothing that the row's other cells do not show.

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

`python -m benchmarks.system_tests.parity.deepspeed --resumes` runs these alone. A run trains {half} steps on one
layout, writes an exchange checkpoint, and trains {half} steps on another layout. A row has the largest relative
error of loss and norm against plain torch without interruption; 1e-05 is allowed. Master weights, moments and
Adam's step count in the engine equal those on disk, bit for bit.

{table(("trained on", "went on as", "loss", "norm", "state"), rows)}

{len(resumes)} changes of layout, {sum(cell.agrees for cell in resumes.values())} agree.
"""


def _cell(cell: Cell | None) -> str:
    return "–" if cell is None else f"{_bold(cell, 'gradient')} / {_bold(cell, 'loss', 'norm')}"


def _bold(cell: Cell, *quantities: str) -> str:
    error = f"{max(cell[quantity] for quantity in quantities):.0e}"
    return error if cell.agrees else f"**{error}**"
