"""Planted faults: proof that the comparison can fail. Nothing in the kit package knows of them.

A fault is installed in a rank's process before its engine is built, by replacing one function of an engine with a
wrong one. Each names the layout in which it must show (``benchmarks/parity/cases.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake."""

    case: str
    """Name of the parity case that must turn red."""
    install: Callable[[], None]
    """Plants it in this process, for good."""


FAULTS: dict[str, Fault] = {}
"""Name → fault. Each engine's faults are appended below its functions."""
