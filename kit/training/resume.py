"""Where a run starts: at the beginning, at its newest good checkpoint, or at a checkpoint that was named."""

from __future__ import annotations

from pathlib import Path

from kit.engines.base import Engine
from kit.errors import CheckpointError
from kit.training.checkpoint.agreement import together
from kit.training.checkpoint.hub import Counters, import_hub
from kit.training.checkpoint.hub_checkpoint import HUB_JSON
from kit.training.checkpoint.native import MANIFEST, NativeCheckpoints

START = Counters(step=0, samples_seen=0, tokens_seen=0, optimizer_steps=0)


def resume_from(engine: Engine, checkpoints: NativeCheckpoints, metrics: Path, resume: str | Path | None) -> Counters:
    """Collective. Load what ``resume`` says into the engine; returns how far it was.

    None: from the beginning, refused where the run directory has a past (its metrics would be overwritten).
    ``"auto"``: the newest good native checkpoint, or the beginning where there is none. A path: a hub checkpoint (of
    any layout, engine and world size) or a native one of this plan; refused where this run has newer checkpoints.
    Raises CheckpointError.
    """
    together(engine.is_main, lambda: _check_past(checkpoints, metrics, resume), "reading the run directory")
    if resume is None:
        return START
    if resume == "auto":
        return checkpoints.load_newest(engine) or START
    directory = Path(resume)
    if (directory / HUB_JSON).is_file():
        counters = import_hub(engine, directory)
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


def _check_past(checkpoints: NativeCheckpoints, metrics: Path, resume: str | Path | None) -> None:
    if resume is None and (metrics.exists() or checkpoints.steps()):
        raise CheckpointError(
            f"{metrics.parent} holds a run that was started already; continue it with --resume auto, or use a new "
            f"run directory"
        )
