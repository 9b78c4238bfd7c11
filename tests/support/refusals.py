"""What something says when it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

LONGEST_LINE = 2000
Errors = type[BaseException] | tuple[type[BaseException], ...]


def refusal(error: Errors, call: Callable[..., object], *given: object, **named: object) -> str:
    """The words with which ``call`` refuses what it is given; a failure where it takes it."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    said = str(caught.value)
    assert max(map(len, said.splitlines()), default=0) < LONGEST_LINE, said[:LONGEST_LINE]  # whatever value it names
    return said
