"""Runs that change engine or layout half-way, beside one that does not: ``python -m benchmarks.system_tests.relay``.

The same tiny Llama on the same text, really launched: ZeRO-3 → Megatron TP2 and Megatron with the distributed
optimizer → ZeRO-2 through exchange checkpoints, with Adam's state; Megatron TP2 → PP2 from the native checkpoint.
Loss and gradient norm of every later step are compared with those of one process of plain torch. Exit code 1 where a
curve leaves its bound.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.page import row, table
from kit.emit.run_directory import RunDirectory
from tests.support import runs
from tests.support.assets import RECIPE, prepare
from tests.support.compare import compare_curves

HALF, WHOLE = 6, 12
EXCHANGE_BOUND = 1e-3
NATIVE_BOUND = 1e-4
COMMON = (f"run.steps={WHOLE}", f"run.checkpoint.every_steps={HALF}", "run.logging.gradients_at_steps=[]")
TORCH = ("layout.micro_batch_size=4",)
ZERO3 = ("cluster=2xcpu", "layout.engine=deepspeed", "layout.zero_stage=3", "layout.micro_batch_size=4")
ZERO2 = ("cluster=2xcpu", "layout.engine=deepspeed", "layout.zero_stage=2", "layout.micro_batch_size=4")
_MEGATRON = ("cluster=2xcpu", "layout.engine=megatron", "layout.micro_batch_size=4")
TP2 = (*_MEGATRON, "layout.tp=2", "layout.sp=true")
DP2 = (*_MEGATRON, "layout.tp=1", "layout.pp=1", "layout.cp=1", "layout.zero_stage=1")
PP2 = (*_MEGATRON, "layout.tp=1", "layout.pp=2", "layout.vp=1")
LEGS = (
    ("ZeRO-3 → Megatron TP2, exchange", ZERO3, TP2, f"exchange-step-{HALF:08d}", EXCHANGE_BOUND),
    ("Megatron DP2, distributed optimizer → ZeRO-2, exchange", DP2, ZERO2, f"exchange-step-{HALF:08d}", EXCHANGE_BOUND),
    ("Megatron TP2 → PP2, native", TP2, PP2, f"step-{HALF:08d}", NATIVE_BOUND),
)


def main() -> int:
    """Run, print a table, judge."""
    prepare()
    failed = False
    with tempfile.TemporaryDirectory(prefix="kit-relay-") as scratch:
        root = Path(scratch)
        expected = _launch(root / "reference", TORCH)
        print(table(("from → to", "steps compared", "largest difference of loss", "of gradient norm", "bound"), []))
        for number, (name, first, second, checkpoint, bound) in enumerate(LEGS):
            half = _launch(root / f"{number}a", first, "--stop-at-step", str(HALF))
            where = str(half.path / "checkpoints" / checkpoint)
            found = _launch(root / f"{number}b", second, "--resume", where)
            curves = runs.metrics(expected), runs.metrics(found)
            errors = [
                compare_curves(*curves, key, range(HALF + 1, WHOLE + 1)).worst_relative_error
                for key in ("loss", "grad_norm")
            ]
            failed |= not max(errors) <= bound
            cells = (name, f"{HALF + 1}–{WHOLE}", *(f"{error:.1e}" for error in errors), f"{bound:.0e}")
            print(row(cells), flush=True)
    return 1 if failed else 0


def _launch(path: Path, words: tuple[str, ...], *arguments: str) -> RunDirectory:
    rundir = runs.emit(RECIPE, path, [*COMMON, *words])
    runs.train(rundir, *arguments)
    return rundir


if __name__ == "__main__":
    sys.exit(main())
