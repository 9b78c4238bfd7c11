"""Whole runs for the tests of the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kit.engines.torch.engine import TorchEngine
from kit.specs.run import DataSpec
from kit.training.data.indexed import IndexedWriter
from kit.training.loop import train
from tests.training import tiny

TIMING = ("step_time_s", "tokens_per_s", "mfu")


def prepare(path: Path, chosen=None, **run: Any) -> tiny.TinyRunDirectory:
    """A run directory with training and held-out data beside it."""
    data = path.parent / "data"
    for name, seed in (("train", 0), ("held-out", 1)):
        if not (data / f"{name}.bin").exists():
            with IndexedWriter(data / name, tokenizer="tiny", vocab_size=tiny.VOCAB_SIZE) as writer:
                for document in tiny.documents(seed=seed):
                    writer.add_document(document)
    spec = DataSpec(train=str(data / "train"), validation=str(data / "held-out"))
    return tiny.run_directory(path, chosen, **({"data": spec, "validation_sequences": 5} | run))


def metrics(rundir: tiny.TinyRunDirectory) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what differs from run to run."""
    rows = [json.loads(line) for line in (rundir.path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMING} for row in rows]


def names(directory: Path) -> list[str]:
    """Names in a directory, sorted."""
    return sorted(path.name for path in directory.iterdir())


def run(rundir: tiny.TinyRunDirectory, **options: Any):
    """One call of the loop on a fresh engine."""
    engine = TorchEngine(rundir)
    try:
        return train(engine, rundir, **options)
    finally:
        engine.close()


def run_failing(rundir: tiny.TinyRunDirectory, **options: Any) -> str:
    """The message of the error that the loop must raise."""
    from kit.errors import KitError

    try:
        run(rundir, **options)
    except KitError as error:
        return str(error)
    raise AssertionError("the run succeeded")
