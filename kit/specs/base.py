"""What every spec shares: frozen, keyword-only, strictly typed, unknown keys refused.

A spec is a pydantic dataclass, so ``dataclasses.replace`` validates again, and the string beneath each
field is its documentation in the JSON schema.
"""

from __future__ import annotations

from pydantic import ConfigDict

SPEC = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
"""Pydantic configuration of every spec."""
