"""Values in Markdown pages."""

from __future__ import annotations

import re


def code(text: str) -> str:
    """A code span that shows ``text`` as it is (CommonMark 0.31, section 6.1: its fence is longer than any inside)."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text[:1] in "` " or text[-1:] in "` " else ""
    return f"{fence}{space}{text}{space}{fence}"


def plain(text: str) -> str:
    """``text`` if it has no Markdown syntax; else a code span."""
    return text if re.fullmatch(r"[A-Za-z0-9]+(?:[ ./:-][A-Za-z0-9]+)*", text) else code(text)
