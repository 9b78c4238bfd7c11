"""Decides where a run starts: at the beginning, at its newest good checkpoint, or at a named checkpoint."""

from __future__ import annotations

from pathlib import Path

from kit.engines.base import Engine
from kit.engines.collective import run_collectively
from kit.errors import CheckpointError
from kit.training.checkpoint.counters import START, Counters
from kit.training.checkpoint.engine_checkpoint import MANIFEST, ForeignError, NativeCheckpoints
from kit.training.checkpoint.exchange import EXCHANGE_JSON, is_exchange, newest_exchange
from kit.training.checkpoint.transfer import import_exchange


def resume_from(engine: Engine, checkpoints: NativeCheckpoints, metrics: Path, resume: str | Path | None) -> Counters:
    """Collective. Load the checkpoint that ``resume`` names into the engine; returns its counters.

    - None: start from the beginning. Refused if the run directory has metrics or checkpoints of an earlier start.
    - ``"auto"``: the newest good native checkpoint, or the beginning if there is none. If the native checkpoints are of
      another plan, the newest exchange checkpoint.
    - A path: an exchange checkpoint (of any layout, engine and world size), a native checkpoint of this plan, or the
      directory of another run, for its newest exchange checkpoint. Refused if this run has newer checkpoints.

    Raises CheckpointError.
    """
    run_collectively(engine.is_main, lambda: _check_past(checkpoints, metrics, resume), "reading the run directory")
    if resume is None:
        return START
    if resume == "auto":
        return _newest(engine, checkpoints)
    directory = Path(resume)
    if (directory / "checkpoints").is_dir():
        directory = _newest_exchange(engine, directory / "checkpoints") or directory
    if is_exchange(directory):
        counters = import_exchange(engine, directory, checkpoints.length)
    elif (directory / MANIFEST).is_file():
        counters = checkpoints.load(engine, directory)
    else:
        raise CheckpointError(
            f"{directory} is not a checkpoint (neither {EXCHANGE_JSON} nor {MANIFEST} in it); give a directory such as "
            f"RUN/checkpoints/exchange-step-00000060, or auto"
        )
    newest = run_collectively(engine.is_main, lambda: max(checkpoints.steps(), default=0), "reading the run directory")[
        0
    ]
    if newest > counters.step:
        raise CheckpointError(
            f"{directory} is of step {counters.step} and this run has a checkpoint of step {newest}; move the newer "
            f"ones away, resume with auto, or use a new run directory"
        )
    return counters


def _newest(engine: Engine, checkpoints: NativeCheckpoints) -> Counters:
    """Load the newest native checkpoint, or the newest exchange checkpoint if the plan has changed since."""
    try:
        return checkpoints.load_newest(engine) or START
    except ForeignError as error:
        exchange = _newest_exchange(engine, checkpoints.root)
        if exchange is None:
            raise
        counters = import_exchange(engine, exchange, checkpoints.length)
        if counters.step < error.step:
            raise CheckpointError(
                f"{error}; the newest exchange checkpoint is of step {counters.step}: name it to lose the steps since"
            ) from error
        if engine.is_main:
            checkpoints.log(f"the plan has changed since step {error.step}: resuming by way of {exchange.name}")
        return counters


def _newest_exchange(engine: Engine, root: Path) -> Path | None:
    return run_collectively(engine.is_main, lambda: newest_exchange(root), f"reading {root}")[0]


def _check_past(checkpoints: NativeCheckpoints, metrics: Path, resume: str | Path | None) -> None:
    if resume is None and (metrics.exists() or checkpoints.steps()):
        raise CheckpointError(
            f"{metrics.parent} holds a run that was started already; continue it with --resume auto, or use a new "
            f"run directory"
        )
