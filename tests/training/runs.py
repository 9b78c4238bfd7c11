"""Whole runs for the tests of the loop."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kit.emit.deepspeed import ds_config
from kit.emit.megatron import applies, megatron_settings
from kit.engines import build_engine
from kit.errors import KitError
from kit.specs.run import DataSpec
from kit.training.data.indexed_writer import IndexedWriter
from kit.training.loop import train
from tests.support import tiny

TIMING = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "data_s",
    "forward_backward_s",
    "optimizer_s",
    "loop_s",
    "slowest_rank",
    "slowest_rank_ratio",
    "checkpoint_s",
    "remote_step",
    "eta_s",
)


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


def steps(rundir: tiny.TinyRunDirectory) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (rundir.path / "metrics.jsonl").read_text().splitlines()]


def events(rundir: tiny.TinyRunDirectory) -> list[dict[str, Any]]:
    """The rows of events.jsonl."""
    return [json.loads(line) for line in (rundir.path / "events.jsonl").read_text().splitlines()]


def metrics(rundir: tiny.TinyRunDirectory) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what differs from run to run."""
    return [{key: value for key, value in row.items() if key not in TIMING} for row in steps(rundir)]


def names(directory: Path) -> list[str]:
    """Names in a directory, sorted."""
    return sorted(path.name for path in directory.iterdir())


def run(rundir: tiny.TinyRunDirectory, stop_at_step: int | None = None, resume: Any = None, **options: Any):
    """One call of the loop on a fresh engine, the one that the plan names."""
    engine = build_engine(with_settings(rundir))  # type: ignore[arg-type]
    try:
        return train(engine, rundir, stop_at_step=stop_at_step, resume=resume, **options)
    finally:
        engine.close()


def trained(
    path: Path, chosen=None, stop_at_step: int | None = None, export_at_end: bool = False, **options: Any
) -> tiny.TinyRunDirectory:
    """A run directory that is prepared and has run, in this process."""
    rundir = prepare(path, chosen, **options)
    run(rundir, stop_at_step, export_at_end=export_at_end)
    return rundir


def run_failing(rundir: tiny.TinyRunDirectory, **options: Any) -> str:
    """The message of the error that the loop must raise."""
    with pytest.raises(KitError) as error:
        run(rundir, **options)
    return str(error.value)


def run_any(rundir: tiny.TinyRunDirectory, stop_at_step: int | None = None, resume: Any = None, **options: Any):
    """Without an exchange checkpoint."""
    return run(rundir, stop_at_step, resume, export_at_end=False, **options)


def with_settings(rundir: tiny.TinyRunDirectory) -> tiny.TinyRunDirectory:
    """With the engine's own file, as ``kit emit`` would write it."""
    plan = rundir.plan
    megatron = megatron_settings(plan) if applies(plan) else {}
    settings = {"deepspeed": lambda: ds_config(plan), "megatron": lambda: megatron}.get(plan.layout.engine, dict)()
    return dataclasses.replace(rundir, settings=settings, megatron=megatron)


def with_run(rundir: tiny.TinyRunDirectory, **changes: Any) -> tiny.TinyRunDirectory:
    """With other keys of run.yaml."""
    return dataclasses.replace(rundir, run=dataclasses.replace(rundir.run, **changes))
