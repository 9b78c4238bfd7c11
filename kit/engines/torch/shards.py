"""Reads a native checkpoint of the torch engine under any layout: each rank takes its box of every tensor out of the
boxes that ranks have written.

A box is the part of a whole tensor that a rank holds: where it starts in each dimension, and its shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from kit.engines.huggingface.models import check_shape
from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.errors import CheckpointError


@dataclass(frozen=True)
class Box:
    """A rank's part of a tensor."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """First index in each dimension."""


@dataclass(frozen=True)
class RankFile:
    """``state-rank….json`` of one rank."""

    optimizer_steps: int
    weight_map: Mapping[str, Mapping[str, str]]
    """Kind of state → name → file."""
    boxes: Mapping[str, Box]


def rank_file(directory: Path, rank: int) -> Path:
    """Path of one rank's ``RankFile``."""
    return directory / f"state-rank{rank:05d}.json"


def read_rank_file(path: Path) -> RankFile:
    """Raises CheckpointError if the file is missing or has not these fields."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        boxes = {name: Box(tuple(whole), tuple(start)) for name, (whole, start) in index["boxes"].items()}
        return RankFile(int(index["optimizer_steps"]), dict(index["weight_map"]), boxes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.parent} is not a checkpoint of the torch engine ({error!r})") from error


class Shards:
    """The boxes in ``directory``. Reads the files of other ranks only where ``own`` has not all."""

    def __init__(self, directory: Path, own: Path) -> None:
        """``own``: the ``RankFile`` to read first."""
        self._directory = directory
        self._left: Iterator[Path] = chain([own], (path for path in _all_of(directory) if path != own))
        self._ranks: list[RankFile] = []
        self._sources: dict[tuple[int, str], SafetensorsSource] = {}

    def read(self, kind: str, name: str, box: Box, target: torch.Tensor) -> None:
        """Fill ``target``, which is ``box`` of tensor ``name``. Raises CheckpointError if a part is missing, or if the
        whole has another shape."""
        missing, seen = target.numel(), set()
        for number, rank in enumerate(self._files()):
            if name not in rank.boxes or name not in rank.weight_map.get(kind, {}):
                break
            there = rank.boxes[name]
            check_shape(name, box.whole, there.whole)
            if missing and there.start not in seen:
                seen.add(there.start)
                missing -= self._copy(number, kind, name, box, there, target)
            if not missing:
                return
        if missing:
            raise CheckpointError(
                f"{self._directory} has {target.numel() - missing} of the {target.numel()} values that this rank needs "
                f"of {kind} {name}; use a complete checkpoint of the same model"
            )

    def _copy(self, number: int, kind: str, name: str, box: Box, there: Box, target: torch.Tensor) -> int:
        """Copy what both boxes have. Returns the number of values."""
        source = self._source(number, kind)
        # Per dimension: (first index, one after the last) in the whole tensor.
        common = [
            (max(a, b), min(a + length, b + width))
            for a, length, b, width in zip(box.start, target.shape, there.start, source.shape(name), strict=True)
        ]
        if any(lower >= upper for lower, upper in common):
            return 0
        mine = tuple(slice(low - a, high - a) for (low, high), a in zip(common, box.start, strict=True))
        theirs = tuple(slice(low - b, high - b) for (low, high), b in zip(common, there.start, strict=True))
        target[mine].copy_(source.read(name)[theirs])
        return target[mine].numel()

    def _files(self) -> Iterator[RankFile]:
        yield from self._ranks
        for path in self._left:
            self._ranks.append(read_rank_file(path))
            yield self._ranks[-1]

    def _source(self, number: int, kind: str) -> SafetensorsSource:
        if (number, kind) not in self._sources:
            files = {name: self._directory / file for name, file in self._ranks[number].weight_map[kind].items()}
            self._sources[number, kind] = SafetensorsSource(files)
        return self._sources[number, kind]


def _all_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("state-rank*.json"))
