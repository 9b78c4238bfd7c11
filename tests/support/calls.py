"""Something that happens before each call of a function, which a test leaves as it is otherwise."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[..., Any]) -> None:
    """``action`` is given the call's arguments. What it returns is lost; what it raises reaches the caller."""
    real = getattr(owner, name)

    def both(*given: Any, **named: Any) -> Any:
        action(*given, **named)
        return real(*given, **named)

    patch.setattr(owner, name, both)


def killing(place: int) -> Callable[..., None]:
    """An act that SIGKILL ends this process by, when it is called for the ``place``-th time."""
    count = itertools.count(1)

    def kill(*_: Any, **__: Any) -> None:
        if next(count) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill
