"""``python -m benchmarks.system_tests.parity.megatron``: every family on every layout of Megatron-core, against
transformers.

python -m benchmarks.system_tests.parity.megatron  the whole table; exit code 1 if any cell disagrees
python -m benchmarks.system_tests.parity.megatron --families llama,qwen3 --layouts cp
python -m benchmarks.system_tests.parity.megatron --plant megatron-swap-qk  with a fault
python -m benchmarks.system_tests.parity.megatron --plant-all  every fault in its layout; exit code 0 if each was caught
python -m benchmarks.system_tests.parity.megatron --write docs/megatron-parity.md

A family's tiny model is trained in one process of plain transformers and torch's AdamW, then on pools of gloo
processes, which import megatron-core once for all layouts of their size. Compared are each parameter's gradient at
step 1, the loss and gradient norm of each step, each weight after the last; and, on one layout of two processes, every
logit.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.page import header, table
from benchmarks.system_tests.parity.megatron_layouts import FAMILIES, LAYOUTS, PLANTED, applies
from kit.specs.model import ModelSpec
from tests.megatron import cases, inside
from tests.training import tiny
from tests.workers import WorkerError, pool

BOUND = 1e-5
"""Largest relative error of a gradient at step 1, of a loss or norm of any step, of a weight after the last."""
LOGITS_BOUND = 1e-4
"""Largest absolute difference of a logit."""
LOGITS_LAYOUTS = {False: "tp2-sp", True: "ep2-tp2-sp"}
"""Where logits are compared: with or without experts."""
STEPS = 20


@dataclass
class Family:
    """One model, its directory, and what plain transformers makes of it."""

    spec: ModelSpec
    directory: Path
    expected: cases.Trajectory


@dataclass
class Cell:
    """How far one family on one layout lies from transformers."""

    errors: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Quantity → largest relative error and where."""
    failure: str = ""

    @property
    def worst(self) -> float:
        return max((error for error, _ in self.errors.values()), default=float("inf"))

    @property
    def agrees(self) -> bool:
        """Within the bound; NaN is not."""
        return not self.failure and self.worst <= BOUND

    def __str__(self) -> str:
        if self.failure:
            return "failed"
        return f"{self.worst:.0e}" if self.agrees else f"**{self.worst:.0e}**"


def main() -> int:
    """Run, print, judge."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="kit-parity-") as scratch:
        bench = _Bench(Path(scratch))
        if arguments.plant or arguments.plant_all:
            names = sorted(PLANTED) if arguments.plant_all else [arguments.plant]
            planted = [bench.run(*PLANTED[name], fault=name) for name in names]
            # One that cannot run is not one that was seen.
            caught = [not cell.agrees and not cell.failure for cell in planted]
            print(f"{len(names)} faults planted, {sum(caught)} caught")
            return (0 if all(caught) else 1) if arguments.plant_all else int(any(caught))
        families = [name for name in FAMILIES if not arguments.families or name in arguments.families.split(",")]
        cells = {
            (layout, family): bench.run(layout, family)
            for layout in sorted(LAYOUTS, key=lambda name: LAYOUTS[name].world_size)
            for family in families
            if arguments.layouts in layout and applies(LAYOUTS[layout], FAMILIES[family])
        }
        logits = {} if arguments.layouts else {family: bench.logits(family) for family in families}
    page = render(cells, families, logits, bench.seconds)
    print(page)
    if arguments.write:
        arguments.write.write_text(page)
    agree = all(cell.agrees for cell in cells.values()) and all(error <= LOGITS_BOUND for error in logits.values())
    return 0 if cells and agree else 1


class _Bench:
    """References and pools, made when first asked for."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._families, self._started = scratch, {}, time.monotonic()
        self._world_size = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def run(self, layout: str, family: str, fault: str | None = None) -> Cell:
        """Train, compare, print one line."""
        chosen, reference = LAYOUTS[layout], self._family(layout, family)
        rundir = cases.run_directory(
            reference.directory / f"{layout}-{fault}", reference.spec, job=FAMILIES[family].job, **chosen.layout
        )
        function, rest = (cases.train, []) if fault is None else (cases.train_with_fault, [fault])
        try:
            found = self._pool(chosen.world_size).run(function, rundir, STEPS, *rest, chosen.packed, timeout_s=300)
            cell = Cell(cases.largest_errors(found[0], reference.expected))
        except WorkerError as error:
            cell = Cell(failure=str(error))
            print(error)
        where = "; ".join(f"{what} {error:.1e} ({place})" for what, (error, place) in cell.errors.items())
        label = f"{layout} {family}" + (f" + {fault}" if fault else "")
        print(f"{'agrees   ' if cell.agrees else 'DISAGREES'} {label}: {where or 'failed'}", flush=True)
        return cell

    def logits(self, family: str) -> float:
        """Largest absolute difference of a logit under tensor parallelism; infinite where it cannot run."""
        layout = LOGITS_LAYOUTS[FAMILIES[family].experts]
        reference = self._family(layout, family)
        rundir = cases.run_directory(
            reference.directory / "logits", reference.spec, job=FAMILIES[family].job, **LAYOUTS[layout].layout
        )
        try:
            (found, *_) = self._pool(2).run(inside.logits, rundir, timeout_s=300)
        except WorkerError as error:
            print(error)
            return math.inf
        difference = (found - inside.hugging_face_logits(reference.spec, reference.directory)).abs().max()
        print(f"logits {family}: {difference:.1e}", flush=True)
        return float(difference.nan_to_num(math.inf))

    def _pool(self, world_size: int) -> Any:
        """Keeps one pool at a time, because each process takes half a GiB."""
        if self._world_size not in (0, world_size):
            pool("megatron", self._world_size).close()
        self._world_size = world_size
        return pool("megatron", world_size)

    def _family(self, layout: str, family: str) -> Family:
        from tests.megatron.conftest import saved_model

        shape = FAMILIES[family].shape | LAYOUTS[layout].shape
        packed = LAYOUTS[layout].packed
        key = family, repr(shape), packed
        if key not in self._families:
            spec = tiny.model(FAMILIES[family].family, **shape)
            directory = Path(tempfile.mkdtemp(dir=self._scratch))
            model = saved_model(spec, directory / cases.HF_DIRECTORY)
            expected = cases.reference(spec, model, STEPS, eps=FAMILIES[family].eps, packed=packed)
            self._families[key] = Family(spec, directory, expected)
        return self._families[key]


def render(
    found: dict[tuple[str, str], Cell], families: Iterable[str], logits: dict[str, float], seconds: float
) -> str:
    """The page of docs: layouts down, families across, the largest error in each cell."""
    families = list(families)
    lines = [
        header("Megatron parity", "make prove NAME=parity-megatron"),
        "Largest relative error of a tiny model in fp32 against plain transformers: of each parameter's gradient at",
        f"step 1, of loss and gradient norm of {STEPS} steps, of each weight after the last; {BOUND:.0e} is allowed.",
        "The four families that the table is first about stand on every layout that is one of theirs, the others on",
        f"some of each kind. The last row: the largest absolute difference of a logit; {LOGITS_BOUND:.0e} is allowed.",
        "",
    ]
    rows = []
    for layout in LAYOUTS:
        cells = [found.get((layout, family)) for family in families]
        if any(cells):
            rows.append((layout, *("–" if cell is None else cell for cell in cells)))
    if logits:
        words = (f"{logits[each]:.0e}" if logits[each] <= LOGITS_BOUND else "**off**" for each in families)
        rows.append(("logits, tp2", *words))
    lines.append(table(("layout", *families), rows))
    agree = sum(cell.agrees for cell in found.values())
    lines += ["", f"{len(found)} cells, {agree} agree; {seconds / 60:.0f} minutes on two cores."]
    return "\n".join(lines) + "\n"


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.system_tests.parity.megatron", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--families", default="", help="comma-separated; default all")
    parser.add_argument("--layouts", default="", help="those whose name contains this")
    parser.add_argument("--write", type=Path, help="where the table goes")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--plant", choices=sorted(PLANTED), help="one fault, in the layout where it shows")
    group.add_argument("--plant-all", action="store_true", help="every fault")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
