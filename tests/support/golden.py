"""One small finished run of each engine, made once a run of pytest; tests that need a finished run copy it.

Six steps of the tiny Llama on random tokens, on two processes, by launch.sh: checkpoints and validation after three
steps and at the end. ``python -m tests.support.golden`` (``make golden``) writes the
curves that they must have, tests/golden/curves.json, which is reviewed like code.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from pathlib import Path

from kit.rehearsal import processes
from tests.support import ROOT, runs, small_run
from tests.support.assets import RECIPE, prepare

CURVES = ROOT / "tests" / "golden" / "curves.json"
MEASURES = ("loss", "grad_norm", "validation_loss")
COMMON = (
    "cluster=2xcpu", "run.steps=6", "job.global_batch_size=8", "job.seq_length=32", "layout.micro_batch_size=2",
    "run.checkpoint.every_steps=3", "run.validation_every_steps=3", "run.validation_sequences=5",
    "run.logging.every_steps=1",
)  # fmt: skip
LAYOUTS = {
    "torch": ("layout.engine=torch", "layout.zero_stage=3"),
    "deepspeed": ("layout.engine=deepspeed", "layout.zero_stage=2"),
    "megatron": ("layout.engine=megatron", "layout.tp=2", "layout.sp=true"),
}
"""Engine → a layout of it that splits what it can split."""


def made(engine: str, directory: Path) -> Path:
    """The engine's folder under ``directory``: data, and the run directory ``run``; the first that asks makes it."""
    directory.mkdir(parents=True, exist_ok=True)
    run = directory / engine
    with (directory / f"{engine}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not run.exists():
            _make(engine, run)
    return run


def _make(engine: str, run: Path) -> None:
    attempt = run.with_name(f"{engine}-attempt")
    shutil.rmtree(attempt, ignore_errors=True)
    attempt.mkdir()
    for name, count in (("train", 20_000), ("validation", 2_000)):
        small_run.write_tokens(attempt / name, count, vocab_size=1024)
    words = (
        f"run.model_path={prepare().model}",
        f"run.data.train={run}/train",
        f"run.data.validation={run}/validation",
        *COMMON,
        *LAYOUTS[engine],
    )
    attempt.rename(run)
    try:
        runs.train(runs.emit(RECIPE, run / "run", words))
    except runs.RunFailed:
        shutil.rmtree(run)
        raise


def curve(run: Path) -> dict[str, list[float]]:
    """What a run directory logged of each measure, in the order of steps."""
    rows = processes.metrics(run)
    return {name: [row[name] for row in rows if row.get(name) is not None] for name in MEASURES}


def main() -> None:
    """Write the curves of today."""
    with tempfile.TemporaryDirectory(prefix="kit-golden-") as directory:
        found = {engine: curve(made(engine, Path(directory)) / "run") for engine in LAYOUTS}
    CURVES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
