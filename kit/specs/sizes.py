"""A bare size, such as ``13B``, → a sensible shape: Llama's layer, made to come near the size."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from kit.errors import SpecError
from kit.specs.count import as_count
from kit.specs.model import ModelSpec
from kit.units import human_count

SMALLEST, LARGEST = 20 * 10**6, 20 * 10**12
VOCABULARY = 32_000
_GROUPED_FROM = 30 * 10**9
"""Parameters from which on eight key/value heads serve all (arXiv 2307.09288, appendix A.2.1)."""
MADE = "made for the size"
"""How the source of such a shape begins."""
_ASPECTS = ((125e6, 64), (1.3e9, 85), (7e9, 128), (70e9, 102), (405e9, 130), (1e12, 200))
"""(parameters, hidden size over layers) of GPT-3 small and XL (arXiv 2005.14165, table 2.1), Llama 7B,
Llama 2 70B, Llama 3.1 405B (arXiv 2407.21783, table 3) and the 1T shape of Narayanan et al. (arXiv 2104.04473)."""


def is_size(text: str) -> bool:
    """Whether the word is a number and M, B or T."""
    return re.fullmatch(r"\d+(\.\d+)?[MBT]", text.strip(), flags=re.IGNORECASE) is not None


def shape_of_size(text: str) -> ModelSpec:
    """A shape within 3 % of the size. Heads are 128 wide (64 below 1B), widths multiples of 128.

    Raises SpecError for a size that no sensible shape has.
    """
    word = text.strip().upper()
    wanted = as_count(word)
    if not SMALLEST <= wanted <= LARGEST:
        raise SpecError(f"model size {text!r} is not between 20M and 20T; give a shape as a mapping instead")
    layers, hidden, ffn = min(_candidates(wanted), key=lambda sizes: _strangeness(wanted, *sizes))
    heads, groups, tied = _heads(wanted, hidden)
    total = _parameters(wanted, layers, hidden, ffn)
    return ModelSpec(
        name=word,
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=hidden // heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tied_embeddings=tied,
        source=(
            f"{MADE} {word}: a Llama of {layers} layers, hidden size {hidden}, MLP {ffn}, {heads} heads of "
            f"{hidden // heads}, {groups} key/value heads, vocabulary {VOCABULARY}{' (tied)' if tied else ''}; "
            f"{human_count(total)} parameters"
        ),
    )


def _candidates(wanted: float) -> Iterator[tuple[int, int, int]]:
    """(layers, hidden, MLP width): the width fills up what the others leave."""
    # Heads and layers in numbers that tensor and pipeline parallelism can divide.
    hidden_step, layer_step = (1024, 4) if wanted >= 5e9 else (512, 4) if wanted >= 1e9 else (128, 2)
    guess = (wanted * _aspect(wanted) / 12) ** (1 / 3)
    first = max(1, round(guess / hidden_step * 0.5))
    for h, layers in itertools.product(
        range(first * hidden_step, int(2 * guess) + 2 * hidden_step, hidden_step), range(layer_step, 257, layer_step)
    ):
        rest = wanted - _parameters(wanted, layers, h, 0)
        ffn = 128 * round(rest / (3 * h * layers * 128))
        if ffn >= h:
            yield layers, h, ffn


def _strangeness(wanted: float, layers: int, hidden: int, ffn: int) -> float:
    """How far from Llama's proportions and from the size."""
    usual = 3.5 if wanted >= _GROUPED_FROM else 8 / 3
    error = _parameters(wanted, layers, hidden, ffn) / wanted - 1
    return (
        math.log(ffn / hidden / usual) ** 2 + math.log(hidden / layers / _aspect(wanted)) ** 2 + (error / 0.02) ** 2 / 4
    )


def _heads(wanted: float, hidden: int) -> tuple[int, int, bool]:
    """(query heads, key/value heads, whether embeddings are tied)."""
    small = wanted < 1e9
    heads = hidden // (64 if small else 128)
    groups = 8 if wanted >= _GROUPED_FROM and heads % 8 == 0 else heads
    return heads, groups, small


def _parameters(wanted: float, layers: int, hidden: int, ffn: int) -> int:
    """Counts the parameters of a Llama of these sizes. kit/cost/model/params.py counts any shape; a test compares the
    two."""
    heads, groups, tied = _heads(wanted, hidden)
    attention = 2 * hidden * hidden + 2 * hidden * hidden * groups // heads
    return layers * (attention + 3 * hidden * ffn + 2 * hidden) + hidden + VOCABULARY * hidden * (1 if tied else 2)


def _aspect(wanted: float) -> float:
    """Hidden size over layers: between the models of the table, on a logarithmic scale."""
    if wanted <= _ASPECTS[0][0]:
        return _ASPECTS[0][1]
    for (low, first), (high, second) in itertools.pairwise(_ASPECTS):
        if wanted <= high:
            share = math.log(wanted / low) / math.log(high / low)
            return first + share * (second - first)
    return _ASPECTS[-1][1]
