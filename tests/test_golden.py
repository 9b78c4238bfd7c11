"""Runs and answers are what is committed: a change of them is reviewed like code (``make golden`` writes them)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import answers, golden

CURVES = json.loads(golden.CURVES.read_text(encoding="utf-8"))
ANSWERS = json.loads(answers.ANSWERS.read_text(encoding="utf-8"))
BOUNDS = {"loss": 1e-6, "validation_loss": 1e-6, "grad_norm": 1e-5}
"""In fp32. Kernels of another CPU (SSE4, AVX2, AVX-512) change losses by 7e-8 and norms by 4e-6 after six steps."""


def compared(answer: dict[str, Any]) -> dict[str, Any]:
    """All of an answer on CI's Python. Since 3.12 ``sum`` compensates its rounding errors, so that the last digits of
    predictions differ, and digests with them: there only the layout and the lines that a person reads."""
    return answer if sys.version_info < (3, 12) else {key: answer[key] for key in ("says", "layout") if key in answer}


@pytest.mark.everyday("deepspeed")
@pytest.mark.parametrize("engine", golden.LAYOUTS)
def test_a_run_has_its_curve(engine: str, golden_run: Callable[[str], Path]) -> None:
    found = golden.curve(golden_run(engine))
    assert {name: len(values) for name, values in found.items()} == {"loss": 6, "grad_norm": 6, "validation_loss": 2}
    for name, bound in BOUNDS.items():
        assert found[name] == pytest.approx(CURVES[engine][name], rel=bound), name


def test_three_engines_have_one_curve() -> None:
    for engine in CURVES:
        for name in BOUNDS:
            assert CURVES[engine][name] == pytest.approx(CURVES["torch"][name], rel=1e-5), (engine, name)


@pytest.mark.everyday("plan llama-3.1-8b --gpus 1xRTX-4090", "plan llama-3-70b --gpus 8x8xH100 --total-tokens 1T")
@pytest.mark.parametrize("question", answers.QUESTIONS)
def test_answers(question: str) -> None:
    assert compared(answers.answer(question)) == compared(ANSWERS["questions"][question])


@pytest.mark.everyday("llama-3.1-8b-sft-zero2-8xh100")
@pytest.mark.parametrize("recipe", answers.recipe_names())
def test_answers_of_recipes(recipe: str) -> None:
    assert compared(json.loads(json.dumps(answers.shipped(recipe)))) == compared(ANSWERS["recipes"][recipe])
