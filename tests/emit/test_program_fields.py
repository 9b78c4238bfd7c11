"""Every key of the files for other programs is a setting of the version that they are for (``program_fields.json``,
written by ``scripts/program_fields.py``)."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

import kit
from kit.emit.generated import shipped_plan
from kit.emit.programs import PROGRAMS
from kit.emit.run_directory import DERIVED_FILES, TARGETS, files_of
from kit.planner.plan import Plan
from kit.specs.job import GrpoSpec, JobSpec, LoraSpec
from kit.specs.layout import Pins
from kit.specs.shipped import recipe_names

RECORDED: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "program_fields.json").read_text())
PATTERNS = {
    "torchtitan": r"--(training|parallelism)\.([\w-]+)",
    "verl": r"^  '?([\w.]+)=",
    "openrlhf": r"^  '?--([\w.]+)",
}
"""Target → where a script names a setting."""
FOR_TRAINERS = {"llamafactory", "ms-swift"}
"""Targets that take transformers' arguments too."""


@functools.cache
def plans() -> list[Plan]:
    shipped = [plan for name in recipe_names() if (plan := shipped_plan(name)) is not None]
    vllm = GrpoSpec(beta=0.04, vllm_gpu_memory_utilization=0.3)
    grpo = JobSpec(objective="grpo", grpo=vllm, seq_length=2048, global_batch_size=512)
    lora = JobSpec(objective="sft", global_batch_size=64, lora=LoraSpec(four_bit=True, use_rslora=True))
    ours: list[tuple[str, JobSpec, Pins]] = [
        ("llama-3.1-8b", JobSpec(global_batch_size=64), Pins(engine="torch", zero_stage=3)),
        ("llama-3.1-8b", lora, Pins(engine="torch", zero_stage=3, tp=1, cp=1)),
        ("llama-3.1-8b", lora, Pins(engine="deepspeed", zero_stage=2)),
        ("llama-3.1-8b", grpo, Pins(engine="torch", zero_stage=3)),
        ("llama-3.1-8b", grpo, Pins(engine="deepspeed", zero_stage=3)),
    ]
    return [*shipped, *(kit.plan(model, "8xH100", job, pins) for model, job, pins in ours)]


def named(target: str, text: str) -> set[str]:
    """Names of the settings in a file."""
    if target not in PATTERNS:
        data: dict[str, Any] = yaml.safe_load(text)
        return set(data) | set(data.get("fsdp_config", {}))
    found = re.findall(PATTERNS[target], text, re.MULTILINE)
    return {".".join(each).replace("-", "_") if isinstance(each, tuple) else each for each in found}


@pytest.mark.parametrize("target", RECORDED)
def test_every_setting_is_one_of_the_version_that_the_file_is_for(target: str) -> None:
    known = set(RECORDED[target]["fields"].split())
    known |= {field.name for field in fields(TrainingArguments)} if target in FOR_TRAINERS else set()
    file = next(file for file in DERIVED_FILES if file.target == target)
    seen: set[str] = set()
    for plan in plans():
        if (text := files_of(plan, [target]).get(file.name)) is not None:
            seen |= named(target, text)
            assert f"# For {PROGRAMS[target][0]} {RECORDED[target]['version']}: " in text
    assert len(seen) >= 10
    assert seen <= known


def test_every_other_program_has_a_version() -> None:
    ours = {"k8s", "sky", "deepcompile", "superoffload"}
    assert set(PROGRAMS) == set(TARGETS) - ours
    assert all(PROGRAMS[target][1] == recorded["version"] for target, recorded in RECORDED.items())


def test_torchtitans_former_names_are_refused() -> None:
    """Those of its release 0.3.0."""
    assert not {"training.local_batch_size", "training.seq_len"} & set(RECORDED["torchtitan"]["fields"].split())
