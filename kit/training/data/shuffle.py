"""The order of samples: a seeded permutation per epoch that is computed, not stored.

``permuted_index(seed, n, k)`` is the k-th sample of an endless sequence in which every block of ``n`` holds each sample
once. It depends on nothing else: every rank, layout and machine agrees, and any position costs the same.

The permutation is a Feistel network over the smallest even number of bits that holds ``n``, with cycle walking: an
image outside the range is encrypted again until it falls inside (Black & Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002, section 4). The domain is less than 4·n, so that takes fewer than four rounds on average.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

_ROUNDS = 6
"""Four rounds make a pseudo-random permutation in theory (Luby & Rackoff 1988). Two more, because the round function
here is weaker."""
_MASK64 = 2**64 - 1


def permuted_index(seed: int, num_samples: int, position: int) -> int:
    """Sample at ``position`` ≥ 0 of the endless sequence, in [0, num_samples)."""
    epoch, index = divmod(position, num_samples)
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    return _permute(index, num_samples, half_bits, (1 << half_bits) - 1, _round_keys(seed, epoch))


def _permute(index: int, num_samples: int, half_bits: int, mask: int, keys: tuple[int, ...]) -> int:
    """The Feistel network with cycle walking. One function, because calls would take half of the time."""
    while True:
        left, right = index >> half_bits, index & mask
        for key in keys:
            # The finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014, figure 14).
            mixed = right ^ key
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK64
            left, right = right, left ^ ((mixed ^ mixed >> 31) & mask)
        index = left << half_bits | right
        if index < num_samples:
            return index


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))
