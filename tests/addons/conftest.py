"""Fixtures of the add-ons' tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.files import file_with


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes a file, and names it from its own folder."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        return file_with(tmp_path / name, text).relative_to(tmp_path)

    return write
