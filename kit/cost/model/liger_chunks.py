"""How many tokens Liger's fused loss takes at a time (liger_kernel 0.8.5, ops/fused_linear_cross_entropy.py).

Its chunks are tokens / ⌈V/(c·h)⌉, rounded up to a power of two; c, ``chunk_mem_const``, is 1 unless it is said.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from kit.specs.layout import LOSS_CHUNK_TOKENS


@cache
def liger_chunk(tokens: int, vocab_size: int, hidden_size: int) -> tuple[int, int]:
    """(chunk_mem_const, tokens of a chunk): the largest chunk up to ours, so that the head's gradient is read and
    written as seldom; or the smallest that Liger has."""
    best = (1, _chunk(1, tokens, vocab_size, hidden_size))
    for budget in range(2, ceil(vocab_size / hidden_size) + 1):
        chunk = _chunk(budget, tokens, vocab_size, hidden_size)
        if chunk > LOSS_CHUNK_TOKENS:
            break
        best = (budget, chunk)
    return best


def _chunk(budget: int, tokens: int, vocab_size: int, hidden_size: int) -> int:
    share = ceil(tokens / ceil(vocab_size / (budget * hidden_size)))
    return min(1 << (share - 1).bit_length(), tokens)
