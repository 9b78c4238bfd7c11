"""Whole runs for the tests of the loop."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kit.emit.deepspeed import ds_config
from kit.emit.megatron import applies, megatron_settings
from kit.engines import build_engine
from kit.errors import KitError
from kit.specs.run import DataSpec
from kit.training.finalize import Summary
from kit.training.loop import train
from tests.support import tiny
from tests.support.refusals import refusal
from tests.support.workers import pool
from tests.training.pairs import pair

one_process = pytest.mark.usefixtures("one_process")

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
            pair(data / name, tiny.documents(seed=seed))
    spec = DataSpec(train=str(data / "train"), validation=str(data / "held-out"))
    return tiny.run_directory(path, chosen, **({"data": spec, "validation_sequences": 5} | run))


def steps(rundir: tiny.TinyRunDirectory, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (rundir.path / file).read_text().splitlines()]


def events(rundir: tiny.TinyRunDirectory) -> list[dict[str, Any]]:
    """The rows of events.jsonl."""
    return steps(rundir, "events.jsonl")


def summary(rundir: tiny.TinyRunDirectory) -> Summary:
    """What the last start of the run has left in summary.json."""
    return Summary(**json.loads((rundir.path / "summary.json").read_text()))


def metrics(rundir: tiny.TinyRunDirectory) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what differs from run to run."""
    return [{key: value for key, value in row.items() if key not in TIMING} for row in steps(rundir)]


def near(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Rows of the same steps and samples, equal but for rounding: another layout adds up in another order."""
    for row, other in zip(found, expected, strict=True):
        assert (row["step"], row["samples_seen"]) == (other["step"], other["samples_seen"])
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


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


OF_THE_LOOP = {*inspect.signature(train).parameters}


def trained(path: Path, chosen=None, stop_at_step: int | None = None, **options: Any) -> tiny.TinyRunDirectory:
    """A run directory that is prepared and has run. ``options`` are of
    the loop and of run.yaml."""
    of_loop = {key: options.pop(key) for key in OF_THE_LOOP & options.keys()}
    rundir = prepare(path, chosen, **options)
    everywhere(rundir, run, stop_at_step, **of_loop)
    return rundir


def resumed(rundir: tiny.TinyRunDirectory, *stops: int | None, **options: Any) -> Summary:
    """Started once for each stop, with ``--resume auto``: the last summary."""
    for stop in stops:
        found = everywhere(rundir, run, stop, "auto", **options)
    return found[0]


def same_curve(path: Path, chosen=None, stops: tuple[int, ...] = (4,), begin: Any = "auto", **options: Any):
    """(a run of one start, a run that was stopped and resumed): the same curve to the bit. Both begin at ``begin``."""
    whole, stopped = (prepare(path / name, chosen, **options) for name in ("whole", "stopped"))
    everywhere(whole, run, None, begin)
    everywhere(stopped, run, stops[0], begin)
    resumed(stopped, *stops[1:], None)
    assert metrics(stopped) == metrics(whole)
    return whole, stopped


def everywhere(rundir: tiny.TinyRunDirectory, function: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
    """What ``function`` returns on each rank: in this process if it is one of a group, else in a pool."""
    layout = rundir.plan.layout
    if dist.is_initialized():
        return [function(rundir, *given, **named)]
    return pool(layout.engine, layout.world_size).run(_called, function, (rundir, *given), named)


def _called(function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return function(*given, **named)


def run_failing(rundir: tiny.TinyRunDirectory, **options: Any) -> str:
    """The message of the error that the loop must raise."""
    return refusal(KitError, run, rundir, **options)


def with_settings(rundir: tiny.TinyRunDirectory) -> tiny.TinyRunDirectory:
    """With the engine's own file, as ``kit emit`` would write it."""
    plan = rundir.plan
    megatron = megatron_settings(plan) if applies(plan) else {}
    settings = {"deepspeed": lambda: ds_config(plan), "megatron": lambda: megatron}.get(plan.layout.engine, dict)()
    return dataclasses.replace(rundir, settings=settings, megatron=megatron)


def with_run(rundir: tiny.TinyRunDirectory, **changes: Any) -> tiny.TinyRunDirectory:
    """With other keys of run.yaml."""
    return dataclasses.replace(rundir, run=dataclasses.replace(rundir.run, **changes))
