"""Counts as people write them: ``4096``, ``10_000``, ``10,000``, ``1.5e9``, ``500M``, ``20B``."""

from __future__ import annotations

import re
from decimal import Decimal

_COUNT = re.compile(
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+|[0-9](?:_?[0-9])*)"
    r"(?P<rest>(?:\.[0-9]*)?(?:e\+?[0-9]{1,2})?) ?(?P<suffix>[MBT]?)",
    re.IGNORECASE,
)
_SUFFIXES = {"": 1, "M": 10**6, "B": 10**9, "T": 10**12}
NO_COUNT = "should be a whole number, such as 4096, 1.5e9, 500M or 20B"
NO_THOUSANDS = "a k is 1000 to some and 1024 to others: write the digits"


def as_count(value: str | float) -> int:
    """The whole number. Raises ValueError with what is wrong. ``4k`` is refused: some mean 4096 by it, some 4000."""
    if isinstance(value, float):
        if value.is_integer():
            return int(value)
        raise ValueError(NO_COUNT)
    match = _COUNT.fullmatch(value.strip())
    if match is None:
        raise ValueError(NO_THOUSANDS if re.fullmatch(r"\s*[0-9.]+ ?k\s*", value, re.IGNORECASE) else NO_COUNT)
    number = Decimal(re.sub("[,_]", "", match["digits"]) + match["rest"]) * _SUFFIXES[match["suffix"].upper()]
    if number != number.to_integral_value():
        raise ValueError(NO_COUNT)
    return int(number)
