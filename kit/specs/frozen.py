"""An immutable, hashable mapping, so that specs with mappings are hashable too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pydantic_core import CoreSchema


class FrozenMap(dict[str, Any]):
    """JSON values or specs by name. It behaves as a dict; lists are stored as tuples."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({key: _frozen(value) for key, value in values.items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=hash))

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, Any]]]:
        return FrozenMap, (dict(self),)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        """For the JSON schema of a field's default."""
        from pydantic_core.core_schema import dict_schema

        return dict_schema()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a spec never changes; make another one with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return FrozenMap(value)
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def thawed(values: dict[str, Any]) -> dict[str, Any]:
    """Copies frozen values to dicts and lists, for programs that need these types."""
    return {key: _plain(value) for key, value in values.items()}
