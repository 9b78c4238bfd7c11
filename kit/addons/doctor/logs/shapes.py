"""Which dimension of a tensor does not fit, and by what it does not divide."""

from __future__ import annotations

import math
from collections.abc import Mapping


def explained(groups: Mapping[str, str | None]) -> str:
    """Text to add to the meaning of a pattern by the groups of its expression: ``shape`` and ``size`` of a view,
    ``shape`` and ``dim``, or ``size`` and ``number`` with the words for them, ``what`` and ``by``."""
    if shape := groups.get("shape"):
        sizes = [int(size) for size in shape.split(",")]
        dim = groups.get("dim")
        return _of_view(sizes, int(groups["size"] or 0)) if dim is None else f"; that dimension has {sizes[int(dim)]}"
    if "number" not in groups or "what" not in groups:
        return ""
    what, by = ((groups[name] or "").strip(" `'=:(") for name in ("what", "by"))
    return f": {f'{what} ' if what else ''}{groups['size']} by {f'{by} ' if by else ''}{groups['number']}"


def _of_view(shape: list[int], elements: int) -> str:
    """Which sizes of a view were wrong, if one alone was."""
    known = [size for size in shape if size >= 0]
    product = math.prod(known)
    if len(known) < len(shape):
        return f": {elements} does not divide by {' × '.join(map(str, known))} = {product}"
    others = [(dim, size, product // size) for dim, size in enumerate(shape) if size]
    alone = [
        f"dimension {dim} would be {elements // rest}, not {size}" for dim, size, rest in others if elements % rest == 0
    ]
    if not alone:
        return f", which has {product}, and changing one of its sizes does not make it fit"
    return f", which has {product}; where one size is wrong, {' or '.join(alone)}"
