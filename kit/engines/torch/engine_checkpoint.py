"""What one rank writes of a native checkpoint of the torch engine: its own tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from kit.engines.io.sharded_safetensors import ShardWriter


@dataclass(frozen=True)
class RankCheckpoint:
    """Live tensors, or copies of them in host memory."""

    rank: int
    optimizer_steps: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]] | None
    """Kind of state → name; None on a rank that holds nothing of its own."""

    def write(self, directory: Path, group: dist.ProcessGroup | None = None) -> None:
        """Into an existing directory; nothing here is collective. Raises OSError or SafetensorError."""
        if self.tensors is None:
            return
        weight_map = {}
        for kind, tensors in self.tensors.items():
            writer = ShardWriter(directory, f"{kind}-rank{self.rank:05d}")
            for name, tensor in tensors.items():
                writer.add(name, tensor.cpu())
            weight_map[kind] = writer.finish()
        index = {"optimizer_steps": self.optimizer_steps, "weight_map": weight_map}
        (directory / f"state-rank{self.rank:05d}.json").write_text(json.dumps(index), encoding="utf-8")
