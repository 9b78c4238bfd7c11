"""The accuracy command on a handful of published rows (rows.json; each names its source)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.accuracy.memory import Result, results_of
from benchmarks.accuracy.programs.megatron import rank_parts
from benchmarks.accuracy.report import as_json
from benchmarks.accuracy.rows import excluded, load, workload_of
from benchmarks.accuracy.strata import Errors, errors_of
from kit.cost.memory.parts import RankParts

ROWS = Path(__file__).with_name("rows.json")
RESULTS = [result for row in load(ROWS) for result in results_of(row)]


def found(name: str, statistic: str = "max_allocated") -> Result:
    return next(result for result in RESULTS if result.row["id"].endswith(name) and result.statistic == statistic)


@pytest.mark.parametrize(
    ("name", "statistic", "limit"),
    [
        ("gpt3_7b_tp4_pp1_memory_speed/dev_dgx_h100", "max_allocated", 0.01),
        ("gpt3_7b_tp4_pp1_memory_speed/dev_dgx_h100", "allocated", 0.005),  # states at the end of a step
        ("gpt3_7b_tp4_pp1_memory_speed/dev_dgx_a100", "max_allocated", 0.01),
        ("gpt3_mcore_te_tp1_pp4_vp1/dev_dgx_a100", "max_allocated", 0.01),
        ("moonlight16b_8gpu_none", "max_allocated", 0.02),
        ("deepseek_proxy_fsdp_ep2_fsdp2/dev_dgx_gb200", "max_allocated", 0.02),
        ("table2_3b_packed", "max_allocated", 0.02),
        ("attn_cudagraph/dev_dgx_h100", "max_allocated", 0.02),
        ("fine_grained_offloading/dev_dgx_h100", "max_allocated", 0.05),
    ],
)
def test_what_source_code_explains(name: str, statistic: str, limit: float) -> None:
    result = found(name, statistic)
    assert result.predicted_gib == pytest.approx(result.measured_gib, rel=limit)


def test_flash_attention_keeps_its_output_twice() -> None:
    """One run on Ampere (flash-attn) and Hopper (cuDNN) differs by 2·h/tp bytes a token and layer, 1 GiB."""
    ampere, hopper = (found(f"gpt3_7b_tp4_pp1_memory_speed/dev_dgx_{gpu}") for gpu in ("a100", "h100"))
    assert ampere.components_gib["activations"] - hopper.components_gib["activations"] == pytest.approx(1.0, rel=0.01)


def parts_of_last_stage(name: str, notes: str | None = None) -> RankParts:
    row = found(name).row
    workload = workload_of(row if notes is None else row | {"notes": notes})
    return rank_parts(workload, workload.layout.pp - 1)


def test_graphs_of_attention_are_fullest_when_they_are_captured() -> None:
    """Two stages of four chunks: 2·4 − 1 chunks of two layers are in flight on the last. Captured are the first norm
    and attention: 4 · 4,096 tokens, half of them on a rank, compressed to 1,536 and 512 in 16 bits and in 8 for the
    next linear layer, 16 heads of a rank with scores in 16 bits. Backward has gradients of both sides of the softmax.
    """
    name, tokens = "attn_cudagraph/dev_dgx_h100", 4 * 4096
    norm = (2 * 512 + 4 + 512) * tokens / 2
    attention = (3 * 1536 + 3 * 512 + 2 * 64) * tokens / 2 + 16 * (2 * (2 * 192 + 128) + 128 + 2 * 4096) * tokens
    parts, plain = parts_of_last_stage(name), parts_of_last_stage(name, "")
    states = parts.states.weights + parts.states.gradients + parts.states.optimizer / 3  # fp32 weights alone
    final_norm = 2 * 2 * 512 * tokens / 2
    scores = 2 * 2 * 16 * 4096 * tokens + 2 * 2 * 512 * tokens
    captured = 14 * (norm + attention) + final_norm + scores
    assert parts.load == pytest.approx(states + parts.buffers + captured, rel=1e-6)
    assert plain.load == 0
    assert plain.saved_activations - parts.saved_activations == pytest.approx(14 * (norm + attention))


def test_a_layer_whose_forward_runs_beside_another_ones_backward() -> None:
    name = "fine_grained_offloading/dev_dgx_h100"
    alone = parts_of_last_stage(name, "")
    assert parts_of_last_stage(name).recomputed_layer == 2 * alone.recomputed_layer > 0
    assert parts_of_last_stage("moonlight16b_8gpu_none", "overlap-moe-expert-parallel-comm").recomputed_layer > 0


def test_marked_rows_are_predicted_but_not_counted() -> None:
    suspect = found("gpt10b_zero3_8xmi300x")
    assert suspect.predicted_gib is not None
    assert as_json([suspect])["strata"] == {}
    assert as_json([suspect])["rows"][0]["skipped"] == "not counted: marked suspect"


def test_fsdp_without_a_recompute_mode_is_not_counted() -> None:
    row = RESULTS[0].row
    for engine, mode, why in (("fsdp", None, "recompute not stated"), ("fsdp", "none", None), ("ddp", None, None)):
        assert excluded(row | {"job": row["job"] | {"engine": engine, "recompute": mode}}) == why


def test_a_row_that_lacks_a_size_says_which() -> None:
    assert "sequence length is an upper bound only" in str(found("table2_3b_baseline").skipped)
    row = RESULTS[0].row | {"model": RESULTS[0].row["model"] | {"vocab_size": None}}
    assert {result.skipped for result in results_of(row)} == {"not stated: vocab_size"}


@pytest.mark.parametrize("section", ["source", "model", "cluster", "job"])
def test_a_row_without_a_section_is_skipped_and_not_crashed_upon(section: str, tmp_path: Path) -> None:
    row = {key: value for key, value in RESULTS[0].row.items() if key not in (section, "group")}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row]))
    results = [result for loaded in load(file) for result in results_of(loaded)]
    assert all(result.skipped or result.predicted_gib for result in results)
    assert as_json(results)["rows"][0]["group"] == row["id"]


def test_keys_that_nobody_knows_change_nothing() -> None:
    row = {**RESULTS[0].row, "job": {**RESULTS[0].row["job"], "new_key": 7}, "new_section": {}}
    assert results_of(row)[0].predicted_gib == results_of(RESULTS[0].row)[0].predicted_gib


def test_groups_weigh_the_same() -> None:
    groups = [("large", 0.125)] * 9 + [("small", 0.25)]
    assert errors_of(groups) == Errors(10, 2, median_absolute=0.125, p90_absolute=0.25, signed_mean=0.1875)


def test_pipeline_layouts() -> None:
    row = json.loads(json.dumps(found("gpt3_mcore_te_tp1_pp4_vp1/dev_dgx_a100").row))
    row["job"] |= {"pp": 4, "vp": 2, "pipeline_layout": "Et*2|(tt|)*5t|L"}
    row["model"]["num_layers"] = 12
    assert results_of(row)[0].skipped == "the stated pipeline layout has 8 parts, not 8 for 12 layers"
    row["model"]["num_layers"] = 13
    assert [len(part) for part in workload_of(row).stated_chunks] == [2, 2, 2, 2, 2, 2, 1, 0]
