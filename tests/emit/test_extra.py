"""``extra`` of a recipe: into the engine's own file, said wherever the plan is, and refused where the plan decides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.emit import deepspeed, megatron
from kit.emit.extra import NOT_PREDICTED, with_extra
from kit.emit.run_directory import RunDirectory, files_of, write
from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.extra import Extra, flat, merged
from kit.specs.job import OptimizerSpec
from kit.specs.recipe import merged_text
from kit.specs.run import RunSpec
from kit.training.__main__ import _announce_edits
from tests.emit.plans import DENSE, FSDP2, ZERO3, plan_of
from tests.support.files import file_with, replace_in
from tests.support.in_process import kit_main, kit_refusal
from tests.support.refusals import refusal

BUCKETS = "zero_optimization.use_multi_rank_bucket_allreduce"
KEYS = {
    "zero_optimization": {"use_multi_rank_bucket_allreduce": True, "log_trace_cache_warnings": False},
    "memory_breakdown": 1,
}
BASE = """
model: llama-3.2-1b
cluster: 8xH100
layout: {engine: deepspeed, zero_stage: 3, implementation: huggingface}
run: {steps: 10, data: {train: data/train}}
extra:
  deepspeed: {zero_optimization: {use_multi_rank_bucket_allreduce: true, sub_group_size: 7}, memory_breakdown: true}
"""
OVER_MEGATRON = {"engine": "deepspeed", "implementation": "local", "dp": 4, "tp": 2, "zero_stage": 2}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    return file_with(
        tmp_path / "own.yaml", "extends: base.yaml\nextra: {deepspeed: {zero_optimization: {sub_group_size: null}}}\n"
    )


def nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return dict(value)


def test_only_the_named_keys_of_the_file_change() -> None:
    """Lists are tuples in a spec; YAML has no tuples."""
    plan = plan_of(**ZERO3)
    before, after = deepspeed.ds_config(plan), deepspeed.ds_config(with_extra(plan, Extra(deepspeed=KEYS)))
    assert flat(after) == flat(before) | flat(KEYS)
    assert before == deepspeed.ds_config(plan), "nothing was changed in place"
    config = {"gradient_accumulation_fusion": False, "moe_router_dtype": None, "moe_a": [1, {"b": [2]}]}
    both = with_extra(plan_of(**OVER_MEGATRON), Extra(deepspeed=KEYS, megatron={"transformer_config": config}))
    settings = strict_yaml.parse_text(files_of(both)["megatron.yaml"], "x").data
    expected = merged(megatron.megatron_settings(plan_of(**OVER_MEGATRON)), {"transformer_config": config})
    assert json.dumps(settings, sort_keys=True) == json.dumps(expected, sort_keys=True)
    assert deepspeed.ds_config(both)["memory_breakdown"] == 1


def test_it_is_in_every_file_of_the_plan_and_not_in_the_prediction(tmp_path: Path) -> None:
    plan = plan_of(**ZERO3)
    other = with_extra(plan, Extra(deepspeed=KEYS))
    files = files_of(other)
    assert [
        json.loads(files[name])["zero_optimization"]["use_multi_rank_bucket_allreduce"]
        for name in ("ds_config.json", "ds_config.trainer.json", "ds_config.own_optimizer.json")
    ] == [True] * 3
    assert f"| `{BUCKETS}` | `true` | `extra` of the recipe: {NOT_PREDICTED} |" in files["ds_config.md"]
    assert (other.predicted, other.digest == plan.digest) == (plan.predicted, False), "another native checkpoint"
    other.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == other
    assert with_extra(plan, Extra()) is plan


SECTIONS = ("parallel_state", "transformer_config", "model", "distributed_data_parallel", "optimizer")
OWNED = [
    *((ZERO3, "deepspeed", key) for key in deepspeed.PLAN_OWNED_KEYS),
    *((DENSE, "megatron", key) for key in megatron.PLAN_OWNED_KEYS),
]


@pytest.mark.parametrize(("layout", "name", "key"), OWNED, ids=[key for _, _, key in OWNED])
def test_what_the_plan_decides_is_refused_with_the_key_to_change(layout: Any, name: str, key: str) -> None:
    """The key itself, a key below it, and the section around it as a value."""
    owner = {"deepspeed": deepspeed.PLAN_OWNED_KEYS, "megatron": megatron.PLAN_OWNED_KEYS}[name][key]
    section, dot, _ = key.partition(".")
    for given, begins in (
        (nested(key, 3), f"extra.{name}.{key}=3: the plan decides {key} of "),
        (nested(f"{key}.a", 1), f"extra.{name}.{key}.a=1: the plan decides {key}"),
        ({section: 1}, f"extra.{name}.{section}=1: the plan decides {section}{dot}"),
    ):
        said = refusal(SpecError, with_extra, plan_of(**layout), Extra(**{name: given}))
        assert said.startswith(begins)
        assert said.endswith(f"; change {owner} in the recipe") or given == {section: 1}


@pytest.mark.parametrize(
    ("layout", "extra", "said"),
    [
        (FSDP2, {"deepspeed": KEYS}, "which has no ds_config.json: leave it out"),
        (ZERO3, {"megatron": {"model": {"a": 1}}}, "which has no megatron.yaml: leave it out"),
        (DENSE, {"megatron": {"transformer_confg": {"a": 1}}}, "did you mean transformer_config?"),
        *((DENSE, {"megatron": {name: 3}}, f"extra.megatron.{name}=3: the plan decides") for name in SECTIONS),
        (OVER_MEGATRON, {"megatron": {"optimizer": {"a": 1}}}, "megatron.yaml has no such section"),
    ],
)
def test_what_no_engine_would_read_is_refused(layout: Any, extra: dict[str, Any], said: str) -> None:
    assert said in refusal(SpecError, with_extra, plan_of(**layout), Extra(**extra))


def test_a_recipe_s_variant_adds_to_it_and_null_takes_away(recipe: Path) -> None:
    assert flat(kit.load_recipe(recipe).extra.deepspeed) == {BUCKETS: True, "memory_breakdown": True}
    copy = file_with(recipe.with_name("copy.yaml"), merged_text(recipe))
    assert kit.load_recipe(copy).extra == kit.load_recipe(recipe).extra
    given = kit.load_recipe(recipe, [f"extra.deepspeed.{BUCKETS}=false"]).extra.deepspeed
    assert given["zero_optimization"] == {"use_multi_rank_bucket_allreduce": False}
    assert "extra.fsdp: unknown key" in refusal(SpecError, kit.load_recipe, recipe, ["extra.fsdp.a=1"])


def test_plan_explain_and_emit_say_it(recipe: Path, tmp_path: Path, capfd: Any) -> None:
    saved, out = str(tmp_path / "plan.yaml"), tmp_path / "run"
    said = kit_main("plan", str(recipe), "--save", saved).out
    assert f"extra=deepspeed.{BUCKETS}=True: {NOT_PREDICTED}" in " ".join(said.split())
    assert f"deepspeed.{BUCKETS}=True" in kit_main("explain", str(recipe)).out
    refused = kit_refusal(["plan", str(recipe), "extra.deepspeed.zero_optimization.stage=2"])
    assert "change layout.zero_stage in the recipe" in refused
    assert kit_main("emit", saved, "run.data.train=a", "run.steps=9", "--out", str(out)).code == 0
    rundir = RunDirectory.open(out)
    assert (rundir.settings["memory_breakdown"], rundir.edits) == (True, ())
    _announce_edits(rundir)
    assert f"extra: deepspeed.{BUCKETS}=True: {NOT_PREDICTED}\n" in capfd.readouterr().out
    replace_in(out / "ds_config.json", '"use_multi_rank_bucket_allreduce": true', '"memory_breakdown": 2')
    assert {(edit.key, edit.planned) for edit in RunDirectory.open(out).edits} >= {(BUCKETS, True)}


def test_a_plan_that_a_run_corrects_keeps_it(recipe: Path, tmp_path: Path) -> None:
    before = kit.plan(kit.load_recipe(recipe)).predicted
    summary, known, saved = (str(tmp_path / name) for name in ("summary.json", "known.yaml", "plan.yaml"))
    Path(summary).write_text(json.dumps({"measured_step_time_s": 2 * before.step_time_s, "measured_memory_gib": 60.0}))
    said = kit_main("plan", str(recipe), "--calibration", known, "--calibrate", summary, "--save", saved)
    assert f"{known}: what {summary} says of runs like it" in said.out
    after = Plan.load(Path(saved))
    assert (after.predicted.step_time_s, after.predicted.peak_gib) == pytest.approx((2 * before.step_time_s, 60.0))
    assert after.extra == kit.load_recipe(recipe).extra


def test_a_plan_file_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    plan = dataclasses.replace(plan_of(**ZERO3), extra=Extra(deepspeed={"zero_optimization": {"stage": 2}}))
    plan.save(tmp_path / "plan.yaml")
    assert "change layout.zero_stage in the recipe" in refusal(
        SpecError, write, Plan.load(tmp_path / "plan.yaml"), RunSpec(), tmp_path / "run"
    )


def test_no_key_or_value_ends_its_cell_of_the_page() -> None:
    page = files_of(with_extra(plan_of(**ZERO3), Extra(deepspeed={"a|`b": "c` | <i>"})))["ds_config.md"]
    assert f'| ``a\\|`b`` | ``"c` \\| <i>"`` | `extra` of the recipe: {NOT_PREDICTED} |' in page
    data = {"deepspeed": {"a": [{"b": "x\ntouch CANARY"}]}}
    own = strict_yaml.Document(name="own.yaml", data=data, lines={})
    assert "U+000A" in refusal(SpecError, strict_yaml.parse, Extra, data, own)


@pytest.mark.parametrize("name", ["adamw-8bit", "lion-8bit", "adafactor"])
def test_an_optimizer_that_megatron_has_not_goes_into_other_engines_files(name: str, tmp_path: Path) -> None:
    chosen = plan_of(**FSDP2 | {"job": {"optimizer": OptimizerSpec(name=name)}})
    assert write(chosen, RunSpec(steps=1), tmp_path / "run").plan.job.optimizer.name == name
