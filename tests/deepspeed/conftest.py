"""One Hugging Face model and the curve of plain torch for each shape, computed once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.specs.job import Objective
from kit.specs.model import ModelSpec
from tests.deepspeed import cases, plain
from tests.support import tiny

STEPS = 3


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> Callable[..., tuple[Path, plain.Curve]]:
    """``references(spec) → (directory of the model, plain torch's curve)``."""

    @functools.cache
    def reference(spec: ModelSpec, steps: int, objective: Objective) -> tuple[Path, plain.Curve]:
        start = cases.hf_directory(tmp_path_factory.mktemp("start"), spec=spec)
        return start, plain.reference(start, steps, spec=spec, objective=objective)

    return lambda spec=None, steps=STEPS, objective="pretrain": reference(spec or tiny.model(), steps, objective)


@pytest.fixture(scope="session")
def start(references) -> Path:
    """The model of ``cases.plan``."""
    return references()[0]
