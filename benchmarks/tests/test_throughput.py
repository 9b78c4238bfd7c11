"""The throughput command on a handful of published rows (throughput_rows.json; each names its source)."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import bands
from benchmarks.accuracy.picture import as_svg
from benchmarks.accuracy.ranking import contradicted, ranked_sets, spearman
from benchmarks.accuracy.rows import about, load
from benchmarks.accuracy.throughput import components_s, measured_step_s, result_of
from benchmarks.accuracy.throughput_page import as_markdown
from benchmarks.accuracy.throughput_report import report_of
from benchmarks.accuracy.throughput_rows import run_of
from benchmarks.accuracy.throughput_strata import without_own_source
from kit.planner.make_plan import make_plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.catalog.rows import rows
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from tests.support import ROOT

ROWS = Path(__file__).with_name("throughput_rows.json")
RESULTS = [result_of(row) for row in load(ROWS)]
BY_ID = {result.row["id"]: result for result in RESULTS}
COUNTED = [result for result in RESULTS if result.counted]


def row(name: str) -> dict[str, Any]:
    return copy.deepcopy(BY_ID[name].row)


@pytest.mark.parametrize("result", COUNTED, ids=[result.row["id"] for result in COUNTED])
def test_counted_rows_are_predicted_within_a_sixth(result: Any) -> None:
    assert abs(result.relative_error) < 1 / 6
    assert sum(result.components_s.values()) == pytest.approx(result.predicted_s)
    assert all(seconds >= 0 for seconds in result.components_s.values())


def test_a_wrong_rate_would_be_noticed() -> None:
    """The limit above turns red for products a quarter too fast."""
    runs = [(result.run, result.measured_s) for result in COUNTED if result.run and result.measured_s]
    wrong = [sum(components_s(run, 1.25).values()) / measured_s - 1 for run, measured_s in runs]
    assert max(map(abs, wrong)) > 1 / 6


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("nemo26.06-GB300-Nemotron-3-Nano-30B-A3B-pretrain-mxfp8-8g", "skipped", "Mamba"),
        ("ds-z2off-1v100-10b", "skipped", "neither"),
        ("bloom-13824x80-h64-dp8tp8pp10-mb4-gb2048", "excluded", "SOURCE INCONSISTENT"),
        ("mlm-h100-weak-16B", "assumed", "recompute"),
    ],
)
def test_what_is_left_out_or_assumed_says_why(name: str, said: str, words: str) -> None:
    assert words in str(getattr(BY_ID[name], said))
    assert not BY_ID[name].counted


EXPERTS = "nemo26.06-GB200-DeepSeek-V3-pretrain-mxfp8-256g-gbs4096"
SHARDED = {"engine": "fsdp", "zero_stage": 3, "attention": "te", "transformer_impl": None}
BF16 = {"precision": "bf16", "transformer_impl": None}


def changed(name: str, **sections: Any) -> dict[str, Any]:
    """A row with other values: those of a section take the place of its own."""
    one = row(name)
    return one | {key: one[key] | new if isinstance(new, dict) else new for key, new in sections.items()}


@pytest.mark.parametrize(
    ("changes", "what", "value"),
    [
        ({"notes": "", "job": {"overlap_moe_comm": True}}, "execution.overlaps_experts", True),
        ({"notes": "", "job": {"overlap_moe_comm": False}}, "execution.overlaps_experts", False),
        ({"notes": "CUDA graphs over attention and router"}, "execution.graphs", "partial"),
        ({"notes": "CUDA graph transformer_engine/moe_router"}, "execution.graphs", "none"),
        ({"notes": "no CUDA graphs"}, "execution.graphs", "none"),
        ({"source": {"address": "who/knows"}, "job": SHARDED}, "implementation", "transformer_engine"),
        ({"source": {"address": "who/knows"}, "job": SHARDED}, "execution.code", "fused"),
        ({"source": {"address": "who/knows"}, "job": SHARDED}, "execution.engine", "fsdp"),
        ({"source": {"address": "who/knows"}, "job": SHARDED}, "execution.unhidden_sharding", 0.0),
        ({"job": {"recompute": "selective"}}, "recompute_modules", {"core_attn"}),
        (
            {"job": {"recompute": "selective", "recompute_detail": "norm, act"}},
            "recompute_modules",
            {"layernorm", "moe_act"},
        ),
        (
            {"job": {"recompute": "selective", "recompute_detail": "layernorm moe"}},
            "recompute_modules",
            {"layernorm", "moe"},
        ),
        ({"job": {"recompute": "selective", "recompute_detail": "op (preset)"}}, "recompute_modules", {"op"}),
        ({"job": {"recompute": "selective", "recompute_detail": "every 2nd layer"}}, "layout.recompute", "full"),
        ({"job": {"recompute": "full", "recompute_detail": "block, 5 of 61 layers"}}, "recompute_layers", 5),
        ({"job": {"recompute": "full", "recompute_detail": "every block"}}, "recompute_layers", None),
        ({"job": {"recompute": "none (block, 0 layers)"}}, "layout.recompute", "none"),
    ],
)
def test_fields_say_what_ran(changes: dict[str, Any], what: str, value: Any) -> None:
    assert attrgetter(what)(run_of(changed(EXPERTS, **changes))) == value


def test_modules_that_backward_recomputes_are_computed_once_more() -> None:
    """Experts, their routing and norms: more than half of a layer of DeepSeek-V3, and less than all of it."""
    some, everything = (
        components_s(run_of(changed(EXPERTS, job={"recompute": words})))["recompute"]
        for words in ("selective: moe, layernorm", "full")
    )
    assert everything / 2 < some < everything


@pytest.mark.parametrize(
    ("date", "stage", "suspect", "why"),
    [
        ("2025-11", 3, False, "experts that ZeRO-3 gathers one by one"),
        ("2025-12", 3, False, None),
        ("2025-11", 2, False, None),
        ("2025-11", 2, True, "marked suspect"),
    ],
)
def test_rows_that_no_figure_counts(date: str, stage: int, suspect: bool, why: str | None) -> None:
    """Experts are one parameter since transformers 5; what a file marks is predicted, and not counted."""
    job = BF16 | {"engine": "deepspeed", "zero_stage": stage}
    found = result_of(changed(EXPERTS, source={"address": "x", "date": date}, job=job, suspect=suspect))
    assert (found.skipped or found.excluded, found.counted) == (why, why is None)


def test_the_measured_time_is_stated_or_implied() -> None:
    one = row("sc21-t1-145B")
    assert measured_step_s(one) == one["check"]["implied_step_time_s"]
    one["measured"]["tokens_per_s_per_gpu"] = 100.0
    assert measured_step_s(one) == pytest.approx(2304 * 2048 / 100 / 1536)
    one["measured"]["step_time_s"] = 3.0
    assert measured_step_s(one) == 3.0


@pytest.mark.everyday("cluster")
@pytest.mark.parametrize("part", ["model", "cluster", "job", "measured"])
def test_a_row_that_lacks_anything_never_crashes(part: str) -> None:
    for result in RESULTS:
        for key in result.row[part]:
            for value in (None, "unheard of") if isinstance(result.row[part][key], str) else (None,):
                found = result_of(result.row | {part: result.row[part] | {key: value}})
                assert found.predicted_s is not None or found.skipped


def test_ranking() -> None:
    in_words = [result.row | {"job": result.row["job"] | {"offload": {"optimizer": 0}}} for result in RESULTS]
    (found,) = ranked_sets(replace(result, row=row) for result, row in zip(RESULTS, in_words, strict=True))
    assert found.layouts == 3
    assert 0 <= found.regret < 0.1
    assert spearman([1, 2, 3], [10, 30, 20]) == pytest.approx(0.5)


def test_a_row_that_contradicts_its_own_layout_is_named_without_any_prediction() -> None:
    one = row("sc21-t1-145B")

    def again(number: int, factor: float, batch: float = 1.0) -> Any:
        measured = one["measured"] | {"step_time_s": factor * (measured_step_s(one) or 0.0)}
        job = one["job"] | {"global_batch_size": round(batch * one["job"]["global_batch_size"])}
        return result_of(one | {"id": f"again-{number}", "measured": measured, "job": job})

    repeated = [again(number, factor) for number, factor in enumerate((1.0, 1.02, 0.98, 1.0))]
    assert contradicted(repeated) == {}
    # A smaller batch that takes as long as the larger one: fewer micro batches pass in the same time.
    found = contradicted([*repeated[:3], again(3, 1.0, batch=0.75)])
    assert found.keys() == {"again-3"}
    assert 0.1 < found["again-3"] < 0.34


def test_the_pipeline_of_old_programs_sends_parts_and_sums_gradients_on_all_ranks() -> None:
    """A Megatron-DeepSpeed row against the same run of a program that sends whole activations and scatters sums."""
    one = row("sc21-t1-145B")
    run = run_of(one | {"notes": "Megatron-DeepSpeed", "job": one["job"] | {"precision": "bf16", "vp": None}})
    assert (run.execution.splits_transfers, run.execution.reduces_in_full) == (True, True)
    run = replace(run, layout=replace(run.layout, zero_stage=1, dp=8))
    whole, scattered, parts = (
        components_s(replace(run, execution=replace(run.execution, splits_transfers=splits, reduces_in_full=in_full)))
        for splits, in_full in ((False, True), (True, False), (True, True))
    )
    assert whole["pipeline_transfer"] > 2 * parts["pipeline_transfer"] > 0
    # Twice the reduction of fp32 gradients, and the gather of 16-bit weights, over once.
    assert parts["data_parallel"] / scattered["data_parallel"] == pytest.approx(5 / 3, rel=0.05)


def test_each_source_is_predicted_without_its_rows() -> None:
    held_out = without_own_source(RESULTS)
    own = {result.row["id"]: result.relative_error for result in COUNTED}
    assert set(own) <= set(held_out)
    # Nobody else measured GB200: its share is borrowed, and the prediction moves.
    only = "nemo26.06-GB200-DeepSeek-V3-pretrain-mxfp8-256g-gbs4096"
    assert held_out[only] != pytest.approx(own[only], abs=1e-3)


def test_a_band_holds_what_it_says() -> None:
    errors = {result.row["id"]: result.relative_error or 0.0 for result in RESULTS}
    for band in bands.bands(RESULTS, errors):
        assert band.holds >= bands.SHARE
    assert all(0 < band["width"] < 1 and band["holds"] >= bands.SHARE for band in rows("bands").values())


def test_plans_with_offload_say_how_far_those_measured_were_off() -> None:
    band = rows("bands")["huggingface with deepspeed, dense, offload"]
    pins = Pins(engine="deepspeed", zero_stage=3, offload_optimizer="cpu")
    plan = make_plan(load_model("llama-3-70b"), parse_cluster("8xH100"), JobSpec(), pins)
    assert band["few"]
    assert plan.predicted.step_time_band is None
    assert f"{band['rows']}, all within ± {band['width']:.0%}" in plan.predicted.step_time_evidence


def test_tables_written_short_are_rows_like_others(tmp_path: Path) -> None:
    eager = {"execution": {"code": "eager", "reduces_in_full": True}, "workload": {"implementation": "nanotron"}}
    steps: dict[str, Any] = {
        "prefix": "table",
        "common": {
            "model": row("mlm-h100-weak-16B")["model"],
            "cluster": {"gpu": "A100-80", "gpus_per_node": 8, "num_gpus": 64},
            "job": {"engine": "megatron", "zero_stage": 1, "cp": 1, "global_batch_size": 256},
            "check": {"flops_per_token_gflop": 100.0},
        },
        "columns": ["tp", "pp", "micro_batch_size", "recompute", "program", "step_time_s"],
        "rows": [[2, 2, 1, "none", "eager", 9.0], [2, 2, 1, "none", "eager", 9.2]],
    }
    flop_rate = steps | {
        "columns": ["tp", "pp", "micro_batch_size", "recompute", "notes", "model_tflops_per_gpu"],
        "rows": [[4, 1, 2, "full", "CUDA graph full_iteration", 200.0]],
    }
    words = "two runs of one layout, and one of which TFLOP/s are known"
    path = tmp_path / "table.json"
    path.write_text(
        json.dumps({"independent": True, "about": words, "programs": {"eager": eager}, "groups": [steps, flop_rate]})
    )
    first, again, flops = load(path)
    assert (about(path), about(ROWS)) == (words, None)
    assert [first["id"], again["id"]] == ["table-tp2-pp2-mb1-eager", "table-tp2-pp2-mb1-eager-again1"]
    assert first["job"]["dp"] == 16
    run = run_of(first)
    assert (run.execution.code, run.execution.reduces_in_full, run.implementation) == ("eager", True, "nanotron")
    # 256 sequences of 4,096 tokens at 100 GFLOP each, on 64 GPUs at 200 TFLOP/s.
    assert measured_step_s(flops) == pytest.approx(256 * first["model"]["seq_length"] * 100e9 / (64 * 200e12))
    assert run_of(flops).execution.graphs == "full"


def test_a_picture_shows_how_far_off_a_prediction_is() -> None:
    """Across from 1 to 100 s on 180 pixels, up from a quarter to four times what was measured."""
    drawn = as_svg({"b": [(10.0, 20.0), (1.0, 1.0)], "a": [(100.0, 1.0)]}, "s")
    dots = [tuple(map(float, each)) for each in re.findall('circle cx="(.*?)" cy="(.*?)"', drawn)]
    assert dots == [(180.0, 180.0), (90.0, 45.0), (0.0, 90.0)]
    assert re.findall('bold">(.*?)<', drawn) == ["a: 1", "b: 2"]
    assert re.findall(r"translate\((.*?)\)", drawn) == ["34 34", "282 34"]
    assert '"M0 80.9H180" stroke="#999" stroke-dasharray' in drawn  # 90 · (1 − ln 1.15 / ln 4)


@pytest.mark.nightly
def test_the_page_of_independent_rows_is_what_the_command_writes() -> None:
    """The committed figures are the model's of today, bands included."""
    file = ROOT / "benchmarks" / "accuracy" / "elsewhere.json"
    found = report_of([result_of(row) for row in load(file)], independent=True)
    assert as_markdown(found, file.name, about(file) or "") == (ROOT / "docs" / "accuracy-elsewhere.md").read_text()
    assert {band.regime: round(band.width, 3) for band in found.bands} == {
        name: band["width"] for name, band in rows("bands-elsewhere").items()
    }
