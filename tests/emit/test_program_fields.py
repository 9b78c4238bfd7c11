"""Every key of the files for other programs is a setting of the version that they are for (``program_fields.json``,
written by ``scripts/program_fields.py``)."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
import yaml
from transformers import TrainingArguments

from kit.addons.targets.programs import PROGRAMS
from kit.emit.run_directory import TARGETS, files_of
from kit.entry_points import registered
from tests.emit.plans import plan_of
from tests.emit.test_other_trainers import OTHERS
from tests.emit.test_rl_trainers import RL
from tests.support import ROOT

RECORDED: dict[str, dict[str, str]] = json.loads((ROOT / "kit/addons/targets/program_fields.json").read_text())
PATTERNS = {
    "torchtitan": r"--(training|parallelism)\.([\w-]+)",
    "verl": r"^  '?([\w.]+)=",
    "openrlhf": r"^  '?--([\w.]+)",
}
"""Target → where a script names a setting."""


def named(target: str, text: str) -> set[str]:
    """Names of the settings in a file."""
    if target not in PATTERNS:
        data = yaml.safe_load(text)
        return set(data) | set(data.get("fsdp_config", {}))
    found = re.findall(PATTERNS[target], text, re.MULTILINE)
    return {".".join(each).replace("-", "_") if isinstance(each, tuple) else each for each in found}


@pytest.mark.parametrize("target", RECORDED)
def test_every_setting_is_one_of_the_version_that_the_file_is_for(target: str) -> None:
    """Of all plans whose values test_other_trainers.py and test_rl_trainers.py know."""
    known = set(RECORDED[target]["fields"].split())
    if target in ("llamafactory", "ms-swift"):  # which take transformers' arguments too
        known |= {field.name for field in fields(TrainingArguments)}
    cases = [(name, plan) for name, of, plan, _ in (OTHERS | RL).values() if of == target]
    texts = [files_of(plan_of(**plan), [target])[name] for name, plan in cases]
    assert set().union(*(named(target, text) for text in texts)) <= known
    assert PROGRAMS[target][1] == RECORDED[target]["version"]
    assert all(f"# For {PROGRAMS[target][0]} {RECORDED[target]['version']}: " in text for text in texts)
    assert min(len(named(target, text)) for text in texts) >= 9


def test_every_other_program_has_a_version() -> None:
    assert set(PROGRAMS) == registered(TARGETS).keys() - {"k8s", "sky", "deepcompile", "superoffload"}
    # Those of torchtitan's release 0.3.0
    assert not {"training.local_batch_size", "training.seq_len"} & set(RECORDED["torchtitan"]["fields"].split())
