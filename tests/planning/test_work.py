"""How much is done to answer ``kit plan`` and ``kit memory``, and what is imported: counted, because times on a busy
machine say little."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from tests.support import ROOT

COUNTED = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
from kit.cli import main
try:
    main()
finally:
    sys.setprofile(None)
    print(calls, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("model", "gpus", "most"), [("llama-3.1-8b", "8xH100", 525_000), ("llama-3.1-405b", "16384xH100", 810_000)]
)
def test_a_cold_plan_costs_few_calls(model: str, gpus: str, most: int) -> None:
    """Imports included. Counted 520,338 and 789,568 calls, of which 15 and 25 % search Megatron's layouts with
    Transformer Engine again."""
    words = [sys.executable, "-c", COUNTED, "plan", model, "--gpus", gpus]
    assert int(subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stderr.split()[-1]) < most


@pytest.mark.parametrize(
    ("words", "there", "absent"),
    [
        ("-c 'import kit'", "kit", {"typer", "pydantic", "yaml", "kit.api", "rich", "dataclasses"}),
        ("-m kit --help", "typer", {"numpy", "torch", "transformers"}),
        # Of names of the catalog.
        ("-m kit plan llama-3-8b --gpus 8xH100", "kit.planner.search",
         {"yaml", "kit.specs.recipe", "rich.console", "pydantic", "pydantic_core"}),
        # Nor what only draws.
        ("-m kit memory llama-3-8b --gpus 8xH100 --json", "kit.report.memory_report",
         {"torch", "transformers", "rich.console", "asyncio", "jinja2", "numpy"}),
    ],
    ids=["import kit", "kit --help", "kit plan", "kit memory --json"],
)  # fmt: skip
def test_nothing_is_imported_before_it_is_needed(words: str, there: str, absent: set[str]) -> None:
    command = [sys.executable, "-X", "importtime", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert imported & {there, *absent} == {there}
