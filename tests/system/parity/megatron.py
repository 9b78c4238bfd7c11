"""Every family on every layout of Megatron-core, against transformers.

    python -m tests.system.parity.megatron  the whole table; exit code 1 if any cell disagrees
    python -m tests.system.parity.megatron --families llama,qwen3 --layouts cp
    python -m tests.system.parity.megatron --plant megatron-swap-qk  with a fault
    python -m tests.system.parity.megatron --plant-all  every fault; exit code 0 if each was caught
    python -m tests.system.parity.megatron --write docs/megatron-parity.md  keeps what other families had

A family's tiny model is trained in one process of plain transformers and torch's AdamW, then on pools of gloo
processes, which import megatron-core once for all layouts of their size. Compared are each parameter's gradient at
step 1, the loss and gradient norm of each step, each weight after the last; and, on one layout of two processes, every
logit.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kit.emit.run_directory import RunDirectory
from kit.specs.model import ModelSpec
from tests.megatron import cases, inside
from tests.support import tiny
from tests.support.page import header, table
from tests.support.program import chosen, faults, judged, run
from tests.support.workers import pool
from tests.system.parity.cell import BOUND, Cell, measured
from tests.system.parity.megatron_layouts import FAMILIES, LAYOUTS, PLANTED, applies

QUANTITIES = ("tokens", "losses", "norms", "initial", "gradients", "masters")
"""Compared; ``initial`` and ``masters`` are the weights before the first step and after the last."""
LOGITS_BOUND = 1e-4
"""Largest absolute difference of a logit."""
LOGITS_LAYOUTS = {False: "tp2-sp", True: "ep2-tp2-sp"}
"""Where logits are compared: with or without experts."""
_LOGITS = "logits, tp2"
STEPS = 20
LIMIT_S = 300


def main(
    families: Annotated[str, typer.Option(help="comma-separated; default all")] = "",
    layouts: Annotated[str, typer.Option(help="those whose name contains this")] = "",
    write: Annotated[Path | None, typer.Option(help="where the table goes")] = None,
    plant: Annotated[str, typer.Option(help="one fault, in the layout where it shows")] = "",
    plant_all: Annotated[bool, typer.Option("--plant-all", help="every fault")] = False,
) -> int:
    """Run, print, judge."""
    names, began = faults(plant, plant_all, PLANTED), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kit-parity-") as scratch:
        bench = _Bench(Path(scratch))
        if names:
            return judged([bench.measure(*PLANTED[name], name).caught for name in names], plant_all)
        some = chosen(families.split(",") if families else [], FAMILIES)
        cells = {
            (layout, family): bench.measure(layout, family)
            for layout in sorted(LAYOUTS, key=lambda name: LAYOUTS[name].world_size)
            for family in some
            if layouts in layout and applies(LAYOUTS[layout], FAMILIES[family])
        }
        ran, minutes = len(cells), (time.monotonic() - began) / 60
        cells |= {} if layouts else {(_LOGITS, family): bench.logits(family) for family in some}
    texts = (_earlier(write) if write else {}) | {key: _text(cell) for key, cell in cells.items()}
    page = render(texts, f"The last run measured {ran} of them in {minutes:.0f} minutes on two cores.")
    print(page)
    if write:
        write.write_text(page)
    return 0 if ran and all(cell.agrees for cell in cells.values()) else 1


class _Bench:
    """References and pools, made when first asked for."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._world_size = scratch, 0
        self._references: dict[Any, tuple[ModelSpec, Path, cases.Trajectory]] = {}

    def measure(self, layout: str, family: str, fault: str | None = None) -> Cell:
        """Train, compare, print one line."""
        (_, _, expected), given = self._reference(layout, family), LAYOUTS[layout]
        rundir = self._run_directory(layout, family, f"{layout}-{fault}")

        def compute() -> tuple[dict[str, float], dict[str, str]]:
            found, *_ = self._pool(given.world_size).run(
                cases.train_with_fault, rundir, STEPS, fault, given.packed, timeout_s=LIMIT_S
            )
            errors = cases.largest_errors(found, expected)
            return {key: error for key, (error, _) in errors.items()}, {
                key: place for key, (_, place) in errors.items()
            }

        return measured(dict.fromkeys(QUANTITIES, BOUND), compute, f"{layout} {family}", fault)

    def logits(self, family: str) -> Cell:
        """Largest absolute difference of a logit under tensor parallelism."""
        layout = LOGITS_LAYOUTS[FAMILIES[family].experts]
        spec, directory, _ = self._reference(layout, family)
        rundir = self._run_directory(layout, family, "logits")

        def compute() -> tuple[dict[str, float], dict[str, str]]:
            found, *_ = self._pool(2).run(inside.logits, rundir, timeout_s=LIMIT_S)
            return {"logits": float((found - inside.hugging_face_logits(spec, directory)).abs().max())}, {}

        return measured({"logits": LOGITS_BOUND}, compute, f"logits {family}")

    def _run_directory(self, layout: str, family: str, name: str) -> RunDirectory:
        spec, directory, _ = self._reference(layout, family)
        return cases.run_directory(directory / name, spec, job=FAMILIES[family].job, **LAYOUTS[layout].layout)

    def _pool(self, world_size: int) -> Any:
        """Keeps one pool at a time, because each process takes half a GiB."""
        if self._world_size not in (0, world_size):
            pool("megatron", self._world_size).close()
        self._world_size = world_size
        return pool("megatron", world_size)

    def _reference(self, layout: str, family: str) -> tuple[ModelSpec, Path, cases.Trajectory]:
        """(model, its directory, what plain transformers makes of it)."""
        from tests.megatron.conftest import saved_model

        shape, packed = FAMILIES[family].shape | LAYOUTS[layout].shape, LAYOUTS[layout].packed
        key = family, repr(shape), packed
        if key not in self._references:
            spec = tiny.model(FAMILIES[family].family, **shape)
            directory = Path(tempfile.mkdtemp(dir=self._scratch))
            model = saved_model(spec, directory / cases.HF_DIRECTORY)
            expected = cases.reference(spec, model, STEPS, eps=FAMILIES[family].eps, packed=packed)
            self._references[key] = spec, directory, expected
        return self._references[key]


def render(texts: dict[tuple[str, str], str], ran: str) -> str:
    """The page of docs: layouts down, families across. ``texts``: (layout, family) → the largest error."""
    families = [family for family in FAMILIES if any(family == each for _, each in texts)]
    rows = [
        (layout, *(texts.get((layout, family), "–") for family in families))
        for layout in (*LAYOUTS, _LOGITS)
        if any(layout == each for each, _ in texts)
    ]
    cells = [text for (layout, _), text in texts.items() if layout != _LOGITS and text != "–"]
    return f"""{header("Megatron parity", "make prove NAME=parity-megatron")}
A tiny model trains in fp32 under Megatron-core and under plain transformers. A cell has the largest relative error
of any parameter's gradient at step 1, of any loss or gradient norm of {STEPS} steps, and of any weight after the
last step; {BOUND:.0e} is allowed. Some families run on every layout that they support, the others on some layouts
of each kind. The last row has the largest absolute difference of a logit; {LOGITS_BOUND:.0e} is allowed.

{table(("layout", *families), rows)}

{len(cells)} cells, {sum(text[0].isdigit() for text in cells)} agree. {ran}
"""


def _earlier(page: Path) -> dict[tuple[str, str], str]:
    """The cells of a page that an earlier run wrote, perhaps for other families."""
    lines = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    (_, *families), _, *rows = lines
    return {(layout, family): text for layout, *row in rows for family, text in zip(families, row, strict=True)}


def _text(cell: Cell) -> str:
    if cell.failure:
        return "failed"
    worst = f"{max(cell[quantity] for quantity in cell.bounds):.0e}"
    return worst if cell.agrees else f"**{worst}**"


if __name__ == "__main__":
    run(main)
