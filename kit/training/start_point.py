"""Decides where a run starts: at the beginning, at its newest good checkpoint, or at a named checkpoint."""

from __future__ import annotations

from pathlib import Path

from kit.engines.collective import run_collectively
from kit.engines.protocol import Engine
from kit.errors import CheckpointError
from kit.training.checkpoint.counters import START, Counters
from kit.training.checkpoint.engine_checkpoint import MANIFEST, ForeignError, NativeCheckpoints
from kit.training.checkpoint.exchange import EXCHANGE_JSON, exchanges, is_exchange, newest_exchange
from kit.training.checkpoint.fetch import fetch
from kit.training.checkpoint.transfer import import_exchange


def resume_from(engine: Engine, checkpoints: NativeCheckpoints, metrics: Path, resume: str | Path | None) -> Counters:
    """Collective. Load the checkpoint that ``resume`` names into the engine; returns its counters.

    - None: start from the beginning. Refused if the run directory, or ``run.checkpoint.remote``, has metrics or
      checkpoints of an earlier start.
    - ``"auto"``: the newest good native checkpoint of the run directory and of ``run.checkpoint.remote``, or the
      beginning if there is none. If the native checkpoints are of another plan, the newest exchange checkpoint.
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
    newest = run_collectively(engine.is_main, lambda: _newest_step(checkpoints), "reading the run directory")[0]
    if newest > counters.step:
        raise CheckpointError(
            f"{directory} is of step {counters.step} and this run has a checkpoint of step {newest}; move the newer "
            f"ones away, resume with auto, or use a new run directory"
        )
    return counters


def _newest(engine: Engine, checkpoints: NativeCheckpoints) -> Counters:
    """Load the newest native checkpoint, or the newest exchange checkpoint if the plan has changed since."""
    try:
        counters = checkpoints.load_newest(engine)
        if counters is None and engine.is_main:
            places = f"{checkpoints.root}{f' or {checkpoints.remote.address}' if checkpoints.remote else ''}"
            checkpoints.log(f"--resume auto: no checkpoint of this run in {places}: starting at step 1")
        return counters or START
    except ForeignError as error:
        _fetch_exchange(engine, checkpoints)
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


def _newest_step(checkpoints: NativeCheckpoints) -> int:
    remote = checkpoints.remote.steps() if checkpoints.remote else []
    return max([*checkpoints.steps(), *remote], default=0)


def _fetch_exchange(engine: Engine, checkpoints: NativeCheckpoints) -> None:
    """Copy the newest exchange checkpoint from object storage if it is newer than those of the run directory."""
    remote = checkpoints.remote
    if remote is None:
        return

    def newer() -> int | None:
        there, here = remote.steps("exchange-step"), exchanges(checkpoints.root)
        return there[0] if there and there[0] > max(here, default=-1) else None

    try:
        step = run_collectively(engine.is_main, newer, f"reading {remote.address}")[0]
        if step is not None:
            fetch(remote, f"exchange-step-{step:08d}", checkpoints.root, engine.is_main)
    except CheckpointError as error:
        if engine.is_main:
            checkpoints.log(f"no exchange checkpoint from {remote.address}: {error}")


def _check_past(checkpoints: NativeCheckpoints, metrics: Path, resume: str | Path | None) -> None:
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
