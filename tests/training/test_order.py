"""The sample order: a permutation, the same everywhere, computed at any position."""

from __future__ import annotations

import itertools
import random

import pytest

from kit.training.data.order import order


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 16, 17, 1000, 4097])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_every_epoch_is_a_permutation(num_samples, epoch):
    first = epoch * num_samples
    assert sorted(order(3, num_samples, first + k) for k in range(num_samples)) == list(range(num_samples))


def test_seed_and_epoch_change_it():
    first, second = ([order(1, 1000, e * 1000 + k) for k in range(1000)] for e in (0, 1))
    other_seed = [order(2, 1000, k) for k in range(1000)]
    for sequence in (second, other_seed):
        agreeing = sum(a == b for a, b in zip(first, sequence, strict=True))
        assert agreeing < 10, "two independent permutations agree at one place on average"


def test_golden_values():
    """Computed once; a change would silently reorder the data of every run that is resumed."""
    assert [order(1234, 1000, k) for k in range(8)] == [675, 661, 45, 199, 283, 288, 732, 786]


def test_huge_sets_cost_nothing():
    seen = {order(0, 10**12, k) for k in range(10_000)}
    assert len(seen) == 10_000
    assert all(0 <= sample < 10**12 for sample in seen)


@pytest.mark.parametrize("num_samples", [100, 1000, 5000])
def test_looks_random(num_samples):
    """Mean distance of neighbours and the rank correlation, against what a shuffle gives."""
    sequence = [order(42, num_samples, k) for k in range(num_samples)]
    shuffled = random.Random(0).sample(range(num_samples), num_samples)

    def neighbours(values):
        return sum(abs(a - b) for a, b in itertools.pairwise(values)) / (len(values) - 1)

    assert neighbours(sequence) == pytest.approx(num_samples / 3, rel=0.25)
    assert neighbours(shuffled) == pytest.approx(num_samples / 3, rel=0.25)
    mean = (num_samples - 1) / 2
    covariance = sum((k - mean) * (value - mean) for k, value in enumerate(sequence)) / num_samples
    correlation = covariance / ((num_samples**2 - 1) / 12)
    assert abs(correlation) < 4 / num_samples**0.5, "four standard errors of a shuffle's correlation"
