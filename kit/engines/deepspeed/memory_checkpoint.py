"""DeepSpeed's own checkpoint, kept in host memory until a thread writes it.

DeepSpeed hands every file of a checkpoint to its checkpoint engine (runtime/checkpoint_engine). The one here copies
what it is given; what DeepSpeed would have written is written later, by the engine that was there before.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine


def copy_checkpoint(engine: Any, tag: str, **options: Any) -> Callable[[Path, dist.ProcessGroup | None], None]:
    """Collective. Copy what ``save_checkpoint(tag)`` writes; returns what writes it into an existing directory."""
    own = engine.checkpoint_engine
    with tempfile.TemporaryDirectory(prefix="kit-snapshot-") as nowhere:
        in_memory = _InMemoryCheckpointEngine(Path(nowhere))
        engine.checkpoint_engine = in_memory
        try:
            engine.save_checkpoint(nowhere, tag=tag, save_latest=False, **options)
        finally:
            engine.checkpoint_engine = own
    return partial(_write, own, in_memory.files)


class _InMemoryCheckpointEngine(CheckpointEngine):
    """Copies files' contents to host memory instead of writing them."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.name = "kit snapshot"
        self.files: dict[Path, Any] = {}
        """Contents of files, by path below the checkpoint's directory."""
        self._root = root

    def create(self, info: CheckpointCommitInfo) -> None: ...

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path).relative_to(self._root)] = _on_host(state_dict, {})

    def load(self, path: str, map_location: Any = None) -> Any:
        raise AssertionError("a snapshot is only written")

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def _write(own: CheckpointEngine, files: dict[Path, Any], directory: Path, group: dist.ProcessGroup | None) -> None:
    for relative, state in files.items():
        path = directory / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        own.save(state, str(path))


def _on_host(value: Any, seen: dict[Any, torch.Tensor]) -> Any:
    """A copy that shares nothing with the live state. A tied tensor is copied once."""
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() == 0 or key not in seen:
            seen[key] = value.detach().to("cpu", copy=True)
        return seen[key]
    if isinstance(value, dict):
        copied = copy.copy(value)  # of the same kind, with what a state dict carries beside its items
        copied.update((key, _on_host(item, seen)) for key, item in value.items())
        return copied
    if type(value) in (list, tuple):
        return type(value)(_on_host(item, seen) for item in value)
    return copy.deepcopy(value)
