"""Copies DeepSpeed's own checkpoint to host memory; a thread writes it later.

DeepSpeed passes every file of a checkpoint to its checkpoint engine (runtime/checkpoint_engine). This module replaces
that engine's ``save`` by a function that copies each file's content to the host. The original ``save`` writes the
copies later.
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


def copy_checkpoint(engine: Any, tag: str, **options: Any) -> Callable[[Path, dist.ProcessGroup | None], None]:
    """Collective. Copy the files of ``save_checkpoint(tag)`` to host memory. Returns a function that writes them into
    an existing directory."""
    own, files = engine.checkpoint_engine, {}
    write = own.save
    with tempfile.TemporaryDirectory(prefix="kit-snapshot-") as nowhere:

        def keep(state_dict: Any, path: str) -> None:
            files[Path(path).relative_to(nowhere)] = _on_host(state_dict, {})

        own.save = keep
        try:
            engine.save_checkpoint(nowhere, tag=tag, save_latest=False, **options)
        finally:
            own.save = write
    return partial(_write, write, files)


def _write(
    write: Callable[[Any, str], object], files: dict[Path, Any], directory: Path, group: dist.ProcessGroup | None
) -> None:
    for relative, state in files.items():
        path = directory / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        write(state, str(path))


def _on_host(value: Any, seen: dict[Any, torch.Tensor]) -> Any:
    """Copy a state dict to the host; the copy shares no memory with the live state. Copies a tied tensor once."""
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() == 0 or key not in seen:
            seen[key] = value.detach().to("cpu", copy=True)
        return seen[key]
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the class and the attributes of a state dict, such as ``_metadata``
        copied.update((key, _on_host(item, seen)) for key, item in value.items())
        return copied
    if type(value) in (list, tuple):
        return type(value)(_on_host(item, seen) for item in value)
    return copy.deepcopy(value)
