"""A configuration to lint: its values with their lines, and the context of its use."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from kit.addons.lint.finding import REMOVE, Changes, Finding, Severity
from kit.addons.lint.json_text import Irregularity
from kit.specs.cluster import ClusterSpec
from kit.specs.model import ModelSpec
from kit.specs.strict_yaml import Document

Reader = Literal["deepspeed", "accelerate", "trainer"]
"""Who reads a DeepSpeed configuration: ``deepspeed.initialize``, an ``Accelerator`` or the Hugging Face Trainer."""
AUTO = "auto"


@dataclass(frozen=True)
class Given:
    """The user's statements about the run; None if not stated."""

    reader: Reader | None = None
    model: ModelSpec | None = None
    cluster: ClusterSpec | None = None
    seq_length: int | None = None
    gradient_checkpointing: bool = False

    def of(self, document: Document) -> Config:
        """A file beside these statements."""
        return Config(document=document, **{each.name: getattr(self, each.name) for each in fields(Given)})


@dataclass(frozen=True, kw_only=True)
class Config(Given):
    """One file and its context."""

    document: Document
    irregularities: tuple[Irregularity, ...] = ()
    processes: int | None = None
    """Number of ranks if a launcher's file states it; else the GPUs of the cluster."""

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value of a dotted key; ``default`` if the key or one of its sections is missing."""
        node: Any = self.document.data
        for step in dotted.split("."):
            if not isinstance(node, dict) or step not in node:
                return default
            node = node[step]
        return node

    def has(self, dotted: str) -> bool:
        """Whether the key exists, even with the value null."""
        missing = object()
        return self.get(dotted, missing) is not missing

    def on(self, dotted: str) -> bool:
        """Whether a switch is on; ``auto`` is not."""
        return truth(self.get(dotted)) is True

    def number(self, dotted: str) -> float | None:
        """A finite number, quoted or not; None if it is missing, ``auto`` or not a number."""
        value = self.get(dotted)
        return None if isinstance(value, bool) else finite(value)

    def section(self, dotted: str) -> dict[str, Any]:
        """A section; empty if the key is missing or not a section."""
        return mapping(self.get(dotted))

    def offloaded(self, name: str) -> str:
        """Device to which a part of DeepSpeed's state is offloaded; empty without offload."""
        device = self.get(f"zero_optimization.offload_{name}.device")
        return device if device in ("cpu", "nvme") else ""

    @property
    def stage(self) -> int | None:
        """ZeRO stage; 0 without the section, None if it is not a number."""
        section = self.get("zero_optimization")
        stage = int(section) if isinstance(section, bool) else self.get("zero_optimization.stage", 0)
        return stage if isinstance(stage, int) else None

    def finding(self, rule: str, severity: Severity, key: str, why: str, fix: str, changes: Changes = ()) -> Finding:
        """A finding at a key (dotted), with its line."""
        return Finding(rule, severity, self.document.name, self.line(key), key, why, fix, changes)

    def moved(self, dotted: str, target: str) -> Changes:
        """The change that moves a value to key ``target``, or removes the value if ``target`` exists."""
        return (*removal(dotted), *(() if self.has(target) else setting(target, self.get(dotted))))

    def line(self, dotted: str) -> int | None:
        """Line of the key, or of the innermost enclosing section with a known line."""
        path = tuple(dotted.split("."))
        found = (self.document.lines.get(path[:length]) for length in range(len(path), 0, -1))
        return next((line for line in found if line is not None), None)


def mapping(value: Any) -> dict[str, Any]:
    """The value, if it is a mapping; else an empty one."""
    return value if isinstance(value, dict) else {}


def finite(value: Any) -> float | None:
    """A finite number, quoted or not; None of anything else. Of a configuration a quoted one is a finding of its own
    (text-value)."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return float(value) if math.isfinite(float(value)) else None
    return None


def truth(value: Any) -> bool | None:
    """A boolean as pydantic reads it; None for ``auto`` and values that are not booleans."""
    return {"true": True, "false": False}.get(str(value).lower())


def removal(dotted: str) -> Changes:
    """The change that removes a key."""
    return ((tuple(dotted.split(".")), REMOVE),)


def setting(dotted: str, value: Any) -> Changes:
    """The change that sets a key."""
    return ((tuple(dotted.split(".")), value),)
