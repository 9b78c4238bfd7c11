"""Something that happens before each call of a function, which a test leaves as it is otherwise."""

from __future__ import annotations

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
