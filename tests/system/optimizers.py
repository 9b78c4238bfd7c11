"""Every optimizer on every engine: weights beside its plain implementation, and what resumes give back.

The cases are those of tests/*/test_optimizers.py: three fp32 steps of a tiny model on one or two processes, clipped,
with weight decay of matrices only. The plain implementation is torch.optim's or bitsandbytes' own class on whole
tensors; for Megatron it is the torch engine in one process, and rows name the version of megatron-core. Prints a row
for each case. The exit code is 1 where a native resume is not the same to the bit, or where fp32 state is more than
1e-5 from the plain implementation.

``--write`` keeps the rows in benchmarks/results/optimizers.json, beside rows of engines that did not run, and writes
the table of docs/optimizers.md. Names are engines: torch, deepspeed, megatron.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from kit.preflight.requirements import check_optimizer
from kit.specs.optimizers import OPTIMIZERS
from tests.deepspeed import test_optimizers as of_deepspeed
from tests.deepspeed.cases import hf_directory
from tests.deepspeed.plain import reference
from tests.megatron import cases as megatron_cases
from tests.megatron import test_optimizers as of_megatron
from tests.megatron.conftest import saved_model
from tests.support import program
from tests.support.page import ROOT, Section, table, write_json
from tests.support.workers import pool
from tests.training import test_optimizers as of_torch

RESULTS = ROOT / "benchmarks" / "results" / "optimizers.json"
BOUND = 1e-5


@dataclass(frozen=True)
class Row:
    """One case."""

    engine: str
    optimizer: str
    layout: str
    weights: float
    """Largest ‖found − plain‖ / ‖plain‖ of a parameter."""
    native: bool
    """Whether a native checkpoint resumes to the bit."""
    exchange: float
    """As ``weights``: the step after an exchange checkpoint, beside the uninterrupted run."""

    @property
    def passes(self) -> bool:
        """Whether the resume is the same, and fp32 state near enough."""
        return self.native and (self.weights < BOUND or self.optimizer.endswith("-8bit"))


def torch_rows(path: Path) -> Iterator[Row]:
    """One process, and the layouts of the tests."""
    for name in of_torch.RATES:
        whole = {"gradient_accumulation_steps": 4}
        _, plain = pool("torch", 1).run(of_torch.beside_plain, of_torch.directory(path / name, name, **whole))[0]
        splits = [split for tried, split in of_torch.TRIED if tried == name]
        for split in ("one process", *splits):
            layout = of_torch.SPLITS.get(split, whole)
            rundir = of_torch.directory(path / name / split, name, **layout)
            found = pool("torch", layout.get("dp", 1) * layout.get("tp", 1)).run(of_torch.train, rundir)
            native = all(rank["same bits"] for rank in found)
            masters, ended, after = found[0]["master"], found[0]["ended"], found[0]["exchanged"]
            yield Row("torch", name, split, largest(masters, plain), native, largest(after, ended))


def deepspeed_rows(path: Path) -> Iterator[Row]:
    """ZeRO stages."""
    start = hf_directory(path)
    for name, stage in of_deepspeed.TRIED:
        plain = reference(start, 3, build=of_deepspeed.PLAIN[name]).masters
        case = path / f"{name}-{stage}"
        found = pool("deepspeed", 2).run(of_deepspeed.train, of_deepspeed.plan(name, stage), start, case)[0]
        error = largest(found["curve"].masters, plain)
        yield Row("deepspeed", name, f"ZeRO-{stage}", error, found["native"], found["exchange error"])


def megatron_rows(path: Path) -> Iterator[Row]:
    """Megatron's layouts, without the optimizers for which the installed megatron-core is too old."""
    directory, spec = path / "megatron", of_megatron.SPEC
    saved_model(spec, directory / "model")
    alone = {"engine": "torch", "implementation": "huggingface", "gradient_accumulation_steps": 4}
    engine = f"megatron {version('megatron-core')}"
    for name, job in of_megatron.JOBS.items():
        one = megatron_cases.run_directory(directory / f"{name}-torch", spec, job=job, **alone)
        plain = pool("torch", 1).run(megatron_cases.train, one, 3)[0].masters
        for layout, split in of_megatron.LAYOUTS.items():
            rundir = megatron_cases.run_directory(directory / f"{name}-{layout}", spec, job=job, **split)
            if check_optimizer(rundir.plan):
                continue
            masters = pool("megatron", 2).run(megatron_cases.train, rundir, 3)[0].masters
            found = pool("megatron", 2).run(megatron_cases.resume, rundir, rundir.path / "checkpoint")[0]
            ends, native, imported = found["finals"]
            same = all(torch.equal(native[each], tensor) for each, tensor in ends.items())
            yield Row(engine, name, layout, largest(masters, plain), same, largest(imported, ends))


ENGINES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "torch": torch_rows,
    "deepspeed": deepspeed_rows,
    "megatron": megatron_rows,
}
largest = of_deepspeed.largest


def main(names: program.Names, write: bool = False) -> int:
    """Run the cases of these engines, or of all."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for engine in program.chosen(names, ENGINES):
            path = Path(directory) / engine
            path.mkdir()
            for row in ENGINES[engine](path):
                rows.append(row)
                print(*asdict(row).values(), sep=" | ", flush=True)
    if write:
        keep(rows)
    return int(not all(row.passes for row in rows))


def keep(rows: list[Row]) -> None:
    """Into the results, in place of rows of the same cases, and into the page."""
    known = {tuple(row.values())[:3]: row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    known |= {(row.engine, row.optimizer, row.layout): asdict(row) for row in rows}
    write_json(RESULTS, list(known.values()))
    Section("docs/optimizers.md", "optimizers over layouts", over_layouts).write()


def over_layouts() -> str:
    """A row for each case of ``RESULTS``, by optimizer."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    order = list(OPTIMIZERS)
    rows = [
        [
            f"`{row['optimizer']}`",
            row["engine"],
            row["layout"],
            f"{row['weights']:.1e}",
            "to the bit" if row["native"] else "differs",
            f"{row['exchange']:.1e}" if row["exchange"] else "to the bit",
        ]
        for row in sorted(found, key=lambda row: order.index(row["optimizer"]))
    ]
    heads = ("`optimizer.name`", "engine", "layout", "weights beside plain", "native resume", "exchange resume")
    return table(heads, rows)


if __name__ == "__main__":
    program.run(main)
