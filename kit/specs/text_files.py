"""Files that people write by hand, read in bounds: of regular files, so much; of JSON, so deep.

Nothing here waits for a FIFO, fills memory with a sparse file or ends in a RecursionError: whatever a path leads to is
text or one reason why not.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 1 << 20
"""The longest recipe, plan or configuration that is read. A plan of 16,384 GPUs has 20 kB."""
DEEPEST = 64
"""Levels of nesting. DeepSpeed's deepest section has four."""
LONGEST_NUMBER = 64
"""Characters of a number. The longest float has 24, and Python itself refuses whole numbers of 4,300 digits."""


def open_regular(path: Path) -> BinaryIO:
    """Opens for reading. Raises OSError, and ValueError where it is not a regular file or no path at all."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO would wait for its writer
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            kind = "a directory" if path.is_dir() else "a device, a socket or a FIFO"
            raise ValueError(f"it is {kind} where a file is expected")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """A whole file of UTF-8. Raises OSError and ValueError; ``reason`` puts both into words."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"it has {size} bytes, and a file of this kind has at most {most}")
        raw = file.read(most + 1)
    if len(raw) > most:  # /proc and the like tell no size
        raise ValueError(f"it has more than {most} bytes, the most for a file of this kind")
    return raw.decode("utf-8")


def reason(error: Exception) -> str:
    """Why a file cannot be read, without its path, which the message names anyway."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    return str(error.strerror if isinstance(error, OSError) else error)


def parse_json(text: str, constant: Callable[[str], Any] | None = None) -> Any:
    """JSON → plain values. Raises ValueError: malformed, a key that is there twice, nesting deeper than ``DEEPEST``, a
    whole number longer than ``LONGEST_NUMBER``. ``constant``: reads Infinity and NaN, which only Python writes."""
    too_deep = f"it is nested more than {DEEPEST} levels deep"
    try:
        value = json.loads(text, parse_int=_whole, parse_constant=constant, object_pairs_hook=_members)
    except RecursionError:
        raise ValueError(too_deep) from None
    level: list[Any] = [[value]]
    for _ in range(DEEPEST + 1):
        members = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for each in members for inner in each if isinstance(inner, dict | list)]
        if not level:
            return value
    raise ValueError(too_deep)


def _whole(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:100]!r} is there twice; keep one")
    return members
