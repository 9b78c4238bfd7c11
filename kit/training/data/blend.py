"""Blends: samples of several sets by weight, in the order of Megatron's ``--data-path WEIGHT PREFIX …``.

Draw k takes the set that lags most behind its share: the first with the largest ``weight · max(k, 1) - taken``
(megatron/core/datasets/helpers.cpp, ``build_blending_indices``). A draw therefore depends on all draws before it. They
are computed in blocks, of which only the counts at the end are kept: a run that resumes at draw k computes k draws, at
about a second a million, and holds as little memory as a new run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np

from kit.engines.protocol import MicroBatch
from kit.training.data.samples import Samples
from kit.training.data.shuffle import permuted_index

_BLOCK = 1 << 15
"""Draws that are computed at a time; some forty milliseconds."""


class Draws:
    """Which set each draw of a blend takes, and which of the set's samples."""

    def __init__(self, weights: Sequence[float]) -> None:
        shares = np.array(weights, dtype=np.float64)
        for _ in range(2):  # megatron-core does so twice, and a last bit decides between sets that lag equally
            shares = shares / np.sum(shares)
        self.shares: list[float] = shares.tolist()
        self._starts = [[0] * len(weights)]
        self._block = lru_cache(maxsize=2)(self._drawn)
        self._lock = Lock()  # a thread reads ahead

    def __call__(self, position: int) -> tuple[int, int]:
        """(set, number of its earlier draws) of the draw at ``position``."""
        number, offset = divmod(position, _BLOCK)
        with self._lock:
            while len(self._starts) <= number:
                self._block(len(self._starts) - 1)
            return self._block(number)[offset]

    def _drawn(self, number: int) -> list[tuple[int, int]]:
        taken, shares, found = list(self._starts[number]), self.shares, []
        for position in range(number * _BLOCK, (number + 1) * _BLOCK):
            reach = float(max(position, 1))
            lags = [share * reach - count for share, count in zip(shares, taken, strict=True)]
            chosen = lags.index(max(lags))
            found.append((chosen, taken[chosen]))
            taken[chosen] += 1
        if len(self._starts) == number + 1:
            self._starts.append(taken)
        return found


class BlendedSamples(Samples):
    """The samples of several sets, numbered through. A set that is used up starts its next epoch."""

    def __init__(self, sets: Sequence[Samples], weights: Sequence[float]) -> None:
        self._sets, self._draws = sets, Draws(weights)
        self._starts = [0, *accumulate(map(len, sets))]

    def __len__(self) -> int:
        """Number of samples of all sets."""
        return self._starts[-1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of so many samples, drawn by weight."""
        pairs = zip(self._draws.shares, self._sets, strict=True)
        return round(len(self) * sum(share * each.num_tokens / len(each) for share, each in pairs))

    def drawn(self, seed: int, position: int) -> int:
        """Sample at ``position`` of the blend's endless sequence."""
        chosen, earlier = self._draws(position)
        return self._starts[chosen] + permuted_index(seed, len(self._sets[chosen]), earlier)

    def set_of(self, index: int) -> int:
        """Number of the set that a sample belongs to."""
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def length(self, index: int) -> int:
        """Number of tokens of a sample."""
        chosen = self.set_of(index)
        return self._sets[chosen].length(index - self._starts[chosen])

    def read_all(self, indices: Sequence[int | None]) -> list[Any]:
        """Samples of their sets, each set's at once."""
        found: dict[int, Any] = {}
        chosen = [0 if index is None else self.set_of(index) for index in indices]
        for number in set(chosen):
            places = [place for place, each in enumerate(chosen) if each == number]
            inside = [None if (k := indices[place]) is None else k - self._starts[number] for place in places]
            found |= zip(places, self._sets[number].read_all(inside), strict=True)
        return [found[place] for place in range(len(indices))]

    def micro_batches(self, batches: Sequence[Sequence[int | None]]) -> list[MicroBatch]:
        """Micro batches of these samples, each with the set that all of its samples are of."""
        sets = [{None if index is None else self.set_of(index) for index in batch} for batch in batches]
        return [
            dataclasses.replace(batch, data_set=of.pop() if len(of) == 1 else None)
            for batch, of in zip(super().micro_batches(batches), sets, strict=True)
        ]

    def collate(self, samples: Sequence[Any]) -> MicroBatch:
        """Micro batch of samples of any sets."""
        return self._sets[0].collate(samples)
