"""A cached property without a lock: ``functools.cached_property`` of Python 3.11 takes one at every first access, which
is a tenth of a search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class cached(Generic[T]):
    """Computes an attribute at its first access, and stores it in the instance. Two threads may both compute it."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._compute(instance)
        return found
