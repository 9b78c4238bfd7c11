"""How much is done to answer ``kit plan`` and ``kit memory``: counted, because times on a busy machine say little."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def loaded_by(*command: str) -> set[str]:
    """Modules that a command imports."""
    words = [sys.executable, "-X", "importtime", "-m", "kit", *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_a_plan_of_catalog_names_loads_neither_recipes_nor_yaml_nor_pydantic() -> None:
    loaded = loaded_by("plan", "llama-3-8b", "--gpus", "8xH100")
    assert not loaded & {"yaml", "kit.specs.recipe", "rich.console", "pydantic", "pydantic_core"}


def test_memory_as_json_loads_neither_torch_nor_what_only_draws() -> None:
    loaded = loaded_by("memory", "llama-3-8b", "--gpus", "8xH100", "--json")
    assert "kit.report.memory_report" in loaded
    assert not loaded & {"torch", "transformers", "rich.console", "asyncio", "jinja2", "numpy"}
