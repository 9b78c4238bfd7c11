"""A progress bar of a conversion, on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from kit.engines.protocol import StateKind, TensorSource
from kit.training.progress import progress_bar


class _Counted(TensorSource):
    """A source that counts the elements which are read."""

    def __init__(self, source: TensorSource, advance: Callable[[int], None]) -> None:
        self._source, self._advance = source, advance

    def names(self) -> Sequence[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name)
        self._advance(tensor.numel())
        return tensor


@contextmanager
def shown(sources: Mapping[StateKind, TensorSource]) -> Iterator[Mapping[StateKind, TensorSource]]:
    """The sources; while entered, a terminal shows how much of them was read, and the time left."""
    total = sum(math.prod(source.shape(name)) for source in sources.values() for name in source.names())
    with progress_bar("tensors", total) as advance:
        yield {kind: _Counted(source, advance) for kind, source in sources.items()}
