"""Writes one rank's file of a native checkpoint of the torch engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from kit.engines.io.sharded_safetensors import DEFAULT_SHARD_BYTES, plan_files
from kit.engines.torch.shards import Box, rank_file


def write_rank_state(
    directory: Path,
    group: dist.ProcessGroup | None,
    *,
    rank: int,
    optimizer_steps: int,
    boxes: Mapping[str, Box],
    tensors: Mapping[str, Mapping[str, torch.Tensor]] | None,
) -> None:
    """Write this rank's tensors into an existing directory. Not collective. Raises OSError or SafetensorError.

    ``tensors``: kind of state → name → tensor of any shape and dtype, live or copied to host memory; None on a rank
    that writes no tensors. ``boxes``: name → this rank's part, of parameters and buffers.
    """
    if tensors is None:
        return
    weight_map: dict[str, dict[str, str]] = {kind: {} for kind in tensors}
    for kind, of_kind in tensors.items():
        num_bytes = {name: (tensor.nbytes,) for name, tensor in of_kind.items()}
        for number, names in enumerate(plan_files(of_kind, num_bytes, 1, DEFAULT_SHARD_BYTES), 1):
            path = directory / f"{kind}-rank{rank:05d}-{number:05d}.safetensors"
            save_file({name: of_kind[name].cpu().contiguous() for name in names}, path, metadata={"format": "pt"})
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            weight_map[kind] |= dict.fromkeys(names, path.name)
    where = {name: (box.whole, box.start) for name, box in boxes.items()}
    index = {"optimizer_steps": optimizer_steps, "weight_map": weight_map, "boxes": where}
    rank_file(directory, rank).write_text(json.dumps(index), encoding="utf-8")
