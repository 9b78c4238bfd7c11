"""Decides where a run starts: at the beginning, at its newest good checkpoint, or at a named checkpoint."""

from __future__ import annotations

from pathlib import Path

from kit.engines.collective import on_all_ranks
from kit.engines.protocol import Engine
from kit.errors import CheckpointError
from kit.training.checkpoint.checkpoints import RunCheckpoints
from kit.training.checkpoint.storage import is_checkpoint, steps_in
from kit.training.counters import START, Counters


def resume_from(engine: Engine, checkpoints: RunCheckpoints, metrics: Path, resume: str | Path | None) -> Counters:
    """Collective. Load the checkpoint that ``resume`` names into the engine; returns its counters.

    - None: start from the beginning. Refused if the run directory, or ``run.checkpoint.remote``, has metrics or
      checkpoints of an earlier start.
    - ``"auto"``: the newest good checkpoint of the run directory and of ``run.checkpoint.remote``, or the beginning if
      there is none.
    - A path: a checkpoint, of any layout, engine and world size; or the directory of another run, for its newest.
      Refused if this run has newer checkpoints.

    Raises CheckpointError.
    """
    on_all_ranks(engine.is_main, lambda: _check_past(checkpoints, metrics, resume), "reading the run directory")
    if resume is None:
        return START
    if resume == "auto":
        found = checkpoints.load_newest(engine)
        if found is None and engine.is_main:
            places = f"{checkpoints.root}{f' or {checkpoints.remote.address}' if checkpoints.remote else ''}"
            checkpoints.log(f"--resume auto: no checkpoint of this run in {places}: starting at step 1")
        return found or START
    directory = on_all_ranks(engine.is_main, lambda: _named(Path(resume)), f"reading {resume}")[0]
    counters = checkpoints.load(engine, directory)
    newest = on_all_ranks(engine.is_main, lambda: _newest_step(checkpoints), "reading the run directory")[0]
    if newest > counters.step:
        raise CheckpointError(
            f"{directory} is of step {counters.step} and this run has a checkpoint of step {newest}; move the newer "
            f"ones away, resume with auto, or use a new run directory"
        )
    return counters


def _named(path: Path) -> Path:
    """A checkpoint, or the newest one of a run directory."""
    newest = next(iter(steps_in(path / "checkpoints").values()), path)
    if not is_checkpoint(newest):
        raise CheckpointError(
            f"{path} is not a checkpoint; give a directory such as RUN/checkpoints/step-00000060, a run directory, or "
            "auto"
        )
    return newest


def _newest_step(checkpoints: RunCheckpoints) -> int:
    remote = checkpoints.remote.steps() if checkpoints.remote else []
    return max([*checkpoints.steps(), *remote], default=0)


def _check_past(checkpoints: RunCheckpoints, metrics: Path, resume: str | Path | None) -> None:
    started, remote = metrics.exists() or checkpoints.steps(), checkpoints.remote
    if remote is not None and resume != "auto" and not started:
        remote.check_writable()
        if there := remote.steps():
            raise CheckpointError(
                f"run.checkpoint.remote={remote.address} has checkpoints of an earlier start, up to step {there[0]}; "
                f"continue it with --resume auto, or give each run a prefix of its own"
            )
    if resume is None and started:
        raise CheckpointError(
            f"{metrics.parent} holds a run that was started already; continue it with --resume auto, or use a new "
            f"run directory"
        )
