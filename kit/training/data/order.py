"""The order of samples: a seeded permutation per epoch that is computed, not stored.

``order(seed, n, k)`` is the k-th sample of an endless sequence in which every block of ``n`` holds each sample
once. It depends on nothing else: every rank, layout and machine agrees, and any position costs the same.

The permutation is a Feistel network over the smallest even number of bits that holds ``n``, with cycle walking: an
image outside the range is encrypted again until it falls inside (Black & Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002, section 4). The domain is less than 4·n, so that takes fewer than four rounds on average.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

ROUNDS = 6
"""Four make a pseudo-random permutation in theory (Luby & Rackoff 1988); two more, as our round function is weaker."""
_MASK64 = 2**64 - 1


def order(seed: int, num_samples: int, position: int) -> int:
    """Sample at ``position`` ≥ 0 of the endless sequence, in [0, num_samples)."""
    epoch, index = divmod(position, num_samples)
    return _permute(index, num_samples, _round_keys(seed, epoch))


def _permute(index: int, num_samples: int, keys: tuple[int, ...]) -> int:
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    while True:
        index = _feistel(index, half_bits, keys)
        if index < num_samples:
            return index


def _feistel(value: int, half_bits: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014, figure 14)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))
