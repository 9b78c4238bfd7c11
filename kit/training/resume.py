"""Where a run starts: at the beginning, at its newest good checkpoint, or at a checkpoint that was named."""

from __future__ import annotations

import re
from pathlib import Path

from kit.engines.base import Engine
from kit.errors import CheckpointError
from kit.training.checkpoint.collective import together
from kit.training.checkpoint.engine_checkpoint import MANIFEST, ForeignError, NativeCheckpoints
from kit.training.checkpoint.exchange import HUB_JSON
from kit.training.checkpoint.transfer import Counters, import_hub

START = Counters(step=0, samples_seen=0, tokens_seen=0, optimizer_steps=0)


def resume_from(engine: Engine, checkpoints: NativeCheckpoints, metrics: Path, resume: str | Path | None) -> Counters:
    """Collective. Load what ``resume`` says into the engine; returns how far it was.

    None: from the beginning, refused where the run directory has a past (its metrics would be overwritten).
    ``"auto"``: the newest good native checkpoint, or the beginning where there is none; where the native ones are of
    another plan, the hub checkpoint of the newest step. A path: a hub checkpoint (of any layout, engine and world
    size), a native one of this plan, or the directory of another run, of which the newest hub checkpoint is taken;
    refused where this run has newer checkpoints. Raises CheckpointError.
    """
    together(engine.is_main, lambda: _check_past(checkpoints, metrics, resume), "reading the run directory")
    if resume is None:
        return START
    if resume == "auto":
        return _newest(engine, checkpoints)
    directory = Path(resume)
    if (directory / "checkpoints").is_dir():
        directory = _newest_hub(engine, directory / "checkpoints") or directory
    if (directory / HUB_JSON).is_file():
        counters = import_hub(engine, directory, checkpoints.length)
    elif (directory / MANIFEST).is_file():
        counters = checkpoints.load(engine, directory)
    else:
        raise CheckpointError(
            f"{directory} is no checkpoint (neither {HUB_JSON} nor {MANIFEST} in it); give a directory such as "
            f"RUN/checkpoints/hub-step-00000060, or auto"
        )
    newest = together(engine.is_main, lambda: max(checkpoints.steps(), default=0), "reading the run directory")[0]
    if newest > counters.step:
        raise CheckpointError(
            f"{directory} is of step {counters.step} and this run has a checkpoint of step {newest}; move the newer "
            f"ones away, resume with auto, or use a new run directory"
        )
    return counters


def _newest(engine: Engine, checkpoints: NativeCheckpoints) -> Counters:
    """Native, or by way of the hub where the plan has changed since."""
    try:
        return checkpoints.load_newest(engine) or START
    except ForeignError as error:
        hub = _newest_hub(engine, checkpoints.root)
        if hub is None:
            raise
        counters = import_hub(engine, hub, checkpoints.length)
        if counters.step < error.step:
            raise CheckpointError(
                f"{error}; the newest hub checkpoint here is of step {counters.step}: name it to lose the steps since"
            ) from error
        if engine.is_main:
            checkpoints.say(f"the plan has changed since step {error.step}: resuming by way of {hub.name}")
        return counters


def _newest_hub(engine: Engine, root: Path) -> Path | None:
    """Of the highest step, complete or not at all by how they are written."""

    def find() -> list[str]:
        names = (path.name for path in root.iterdir() if (path / HUB_JSON).is_file()) if root.is_dir() else ()
        return sorted(name for name in names if re.fullmatch(r"hub-step-\d{8}", name))

    found = together(engine.is_main, find, f"reading {root}")[0]
    return root / found[-1] if found else None


def _check_past(checkpoints: NativeCheckpoints, metrics: Path, resume: str | Path | None) -> None:
    if resume is None and (metrics.exists() or checkpoints.steps()):
        raise CheckpointError(
            f"{metrics.parent} holds a run that was started already; continue it with --resume auto, or use a new "
            f"run directory"
        )
