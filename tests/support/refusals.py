"""What something says when it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Errors = type[BaseException] | tuple[type[BaseException], ...]


def refusal(error: Errors, call: Callable[..., object], *given: object, **named: object) -> str:
    """The words with which ``call`` refuses what it is given; a failure where it takes it."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    return str(caught.value)
