"""The versions of megatron-core that the engine was tested with, and all that it does differently for any of them."""

from __future__ import annotations

from typing import Any

TESTED = ("0.16.1", "0.19.2")
"""The newest for Python 3.11, which CI runs, and one for Python 3.12 (scripts/parity-py312.sh)."""


def check_adam_arguments(newer: dict[str, Any]) -> None:
    """0.19 passes ``capturable`` to every Adam (optimizer/__init__.py): whether CUDA graphs capture the step."""
    assert newer in ({}, {"capturable": False}), newer


def check_attention_arguments(newer: dict[str, Any]) -> None:
    """0.19 tells modules their own names (transformer/transformer_layer.py), which nothing here reads."""
    assert set(newer) <= {"name"}, newer
