"""How much is done to answer ``kit memory``: counted, because times on a busy machine say little."""

from __future__ import annotations

import subprocess
import sys
from types import FrameType
from typing import Any

import pytest

from kit.planner.request import Request
from kit.report.memory_report import memory_report
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec


def calls_of(model: str, gpus: str) -> int:
    """Functions entered, Python's own too, while the layouts are searched and the best is reported."""
    counted = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    spec, cluster = load_model(model), parse_cluster(gpus)
    memory_report(Request(model=spec, cluster=cluster, job=JobSpec()))  # what is kept for the process is kept now
    sys.setprofile(count)
    try:
        memory_report(Request(model=spec, cluster=cluster, job=JobSpec()))
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize(
    ("model", "gpus", "most"), [("llama-3-8b", "8xH100", 190_000), ("llama-3.1-405b", "512xH100", 200_000)]
)
@pytest.mark.slow
def test_a_search_asks_a_layer_only_once_what_it_is_made_of(model: str, gpus: str, most: int) -> None:
    """Counted 177,799 and 191,675 calls; 195,230 and 278,792 when equal stages were timed one by one."""
    assert calls_of(model, gpus) < most


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
    ("model", "gpus", "most"), [("llama-3.1-8b", "8xH100", 462_000), ("llama-3.1-405b", "16384xH100", 650_000)]
)
def test_a_cold_plan_costs_few_calls(model: str, gpus: str, most: int) -> None:
    """The commands of benchmarks/performance/plan_time.py, imports included: counted 443,708 and 592,665 calls; 465,022
    and 814,904 when every further layout was timed, and equal stages one by one."""
    words = [sys.executable, "-c", COUNTED, "plan", model, "--gpus", gpus]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stderr.split()[-1]) < most


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
