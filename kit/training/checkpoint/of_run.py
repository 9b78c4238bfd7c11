"""Checkpoints by their run directory: its newest one, and the model that the run started from."""

from __future__ import annotations

from pathlib import Path

from kit.errors import CheckpointError
from kit.specs import strict_yaml
from kit.specs.hub import is_elsewhere
from kit.training.checkpoint.storage import is_checkpoint, steps_in
from kit.training.hub_files import local

_RUN = "run.yaml"


def newest_step(path: Path) -> Path:
    """The newest complete checkpoint of a run directory; any other path as it is. Raises CheckpointError for a run
    without one."""
    if not (path / _RUN).is_file():
        return path
    steps = [directory for directory in steps_in(path / "checkpoints").values() if is_checkpoint(directory)]
    if not steps:
        raise CheckpointError(f"{path} is a run without a checkpoint; train it first: kit train {path}")
    return steps[0]


def started_from(checkpoint: Path) -> Path | None:
    """The directory of ``run.model_path`` of the run that wrote a checkpoint; of a hub id, in the cache. None if there
    is none on this disk."""
    run = checkpoint.resolve().parent.parent / _RUN
    named = strict_yaml.read(run).data.get("model_path") if run.is_file() else None
    if named is None:
        return None
    if is_elsewhere(str(named), run.parent):
        return local(str(named))
    found = (run.parent / Path(str(named)).expanduser()).resolve()
    return found if found.is_dir() else None
