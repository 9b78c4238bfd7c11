"""What every spec shares: frozen, keyword-only, strictly typed, unknown keys refused.

A spec is a pydantic dataclass, so ``dataclasses.replace`` validates again. The string beneath each field is its
documentation in the JSON schema too (``kit/specs/schema.py``).
"""

from __future__ import annotations

from pydantic import ConfigDict

SPEC = ConfigDict(extra="forbid", strict=True)
"""Pydantic configuration of every spec."""
