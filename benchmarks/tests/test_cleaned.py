"""Rows as somebody may have written them: read where they can be read one way, else left out by name, never a crash."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.cleaned import completed
from benchmarks.accuracy.hardware import gpu_of
from benchmarks.accuracy.pipelines import NotPredictedError
from benchmarks.accuracy.throughput import result_of
from kit.specs import strict_yaml
from tests.support.refusals import refusal

ROWS = Path(__file__).with_name("throughput_rows.json")
RAW = {row["id"]: row for row in json.loads(ROWS.read_text())}
NAME = "kor22-530B-selsp"
"""280 A100-80: every size of it is stated."""


def changed(**changes: Any) -> Any:
    """The row with ``section__key=value``, as a file would hold it."""
    row = copy.deepcopy(RAW[NAME])
    for name, value in changes.items():
        section, _, key = name.partition("__")
        row[section] = row[section] | {key: value} if key else value
    return result_of(completed([row])[0])


PLAIN = changed()


@pytest.mark.parametrize(
    "changes",
    [
        {"job__tp": "8"},
        {"job__tp": 8.0},
        {"job__dp": None},
        {"job__recompute": "Selective (attention core)"},
        {"job__zero_stage": str(RAW[NAME]["job"]["zero_stage"])},
        {"cluster__gpu": "NVIDIA A100-SXM4-80GB"},
        {"cluster__gpu": "A100 80GB"},
        {"cluster__gpu": "A100", "cluster__gpu_memory_gib": 80},
        {"cluster__inter_node_gbps_per_gpu": str(RAW[NAME]["cluster"]["inter_node_gbps_per_gpu"])},
    ],
    ids=str,
)
def test_what_can_be_read_one_way_changes_nothing(changes: dict[str, Any]) -> None:
    result = changed(**changes)
    assert (result.predicted_s, result.counted) == (pytest.approx(PLAIN.predicted_s), True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job__tp": -8}, "job.tp=-8 is no size"),
        ({"job__micro_batch_size": 0}, "job.micro_batch_size=0 is no size"),
        ({"model__hidden_size": "wide"}, "model.hidden_size='wide' is no size"),
        ({"cluster__num_gpus": None}, "not stated: cluster.num_gpus"),
        ({"job__zero_stage": 4}, "no stage of ZeRO"),
        ({"job__precision": "int8"}, "job.precision='int8'"),
        ({"job__engine": "colossalai"}, "job.engine='colossalai' is not understood"),
        ({"job__optimizer": "shampoo"}, "job.optimizer='shampoo' is not understood"),
        ({"job__precision": "fp8"}, "no rate of fp8 on A100-80"),
        ({"model__moe": "8x7B"}, "model.moe='8x7B' is no object"),
        ({"model__moe": {"num_experts": 8}}, "not stated: moe.experts_per_token"),
        ({"source": "a paper"}, "damaged: source='a paper'"),
        ({"measured__step_time_s": "12 s", "check": None}, "neither a step time"),
        ({"measured__step_time_s": -1, "check": None}, "neither a step time"),
        ({"cluster__gpu": "H100-NVL"}, "no data-sheet figures of H100-NVL"),
        ({"cluster__gpu": "H20-141"}, "no data-sheet figures of H20-141"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_left_out_by_name(changes: dict[str, Any], words: str) -> None:
    result = changed(**changes)
    assert (result.predicted_s, words in str(result.skipped)) == (None, True)


def test_sizes_that_contradict_each_other_are_predicted_and_not_counted() -> None:
    more = changed(cluster__num_gpus=560)
    assert (more.predicted_s is not None, more.counted) == (True, False)
    assert "make 280 GPUs, not 560" in str(more.excluded)
    assert "tp=1, pp=35, cp=1, dp=1 make 35 GPUs, not 280" in str(changed(job__tp=None).excluded)
    assert "more than global_batch_size" in str(changed(job__micro_batch_size=10**4).excluded)


def test_a_mode_that_nobody_knows_is_taken_as_not_stated() -> None:
    assert "recompute" in str(changed(job__recompute="every third tensor").assumed)
    assert changed(job__recompute=False).assumed is None


@pytest.mark.parametrize(
    ("name", "same"),
    [("H100-80", "H100"), ("H800-80", "H800"), ("H200-141", "H200"), ("B200-192", "B200"), ("A800", "A800-80")],
)
def test_a_part_by_another_name(name: str, same: str) -> None:
    assert gpu_of(name).name == same


@pytest.mark.parametrize("name", ["A100", "B100", "H100 NVL", "TPU v5p", "", "None"])
def test_another_part_is_refused(name: str) -> None:
    assert "no data-sheet figures" in refusal(NotPredictedError, gpu_of, name)


def test_names_are_told_apart_and_rows_that_are_none_say_so() -> None:
    """A row that says other than its own source is mended, a row of another source with its name is not."""
    qwen = {
        "id": "qwen18b-full-2048",
        "source": {"address": "QwenLM/Qwen:README.md@03cd81f5"},
        "job": {"engine": "ddp"},
    }
    rows = completed([RAW[NAME], RAW[NAME], "a row", None, {"id": 7}, qwen, qwen | {"source": {"address": "me"}}])
    assert [(row["id"], row["job"].get("engine")) for row in rows] == [
        (NAME, "megatron"),
        (f"{NAME} (2)", "megatron"),
        ("row 2", None),
        ("row 3", None),
        ("7", None),
        (qwen["id"], "deepspeed"),
        (f"{qwen['id']} (2)", "ddp"),
    ]
    assert "damaged" in str(result_of(rows[2]).skipped)
    assert "neither" in str(result_of(rows[4]).skipped)


@pytest.mark.parametrize(
    ("text", "words"),
    [("no", "cannot be read as JSON"), ('{"x": 1}', "holds no rows"), ('{"rows": 5}', "holds no rows")],
)
def test_a_file_without_rows_is_one_error(text: str, words: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["accuracy", "throughput", "--data", str(path)])
    assert refusal(SystemExit, main) == "2"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "file", "keys", "stratum", "title"),
    [
        ("memory", "rows.json", {"group", "measured_gib", "predicted_gib"}, "peak above 4 GiB", "the memory"),
        pytest.param(
            *("throughput", "throughput_rows.json"),
            *({"split_group", "measured_step_time_s", "predicted_step_time_s"}, "all rows", "the step-time"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_command_writes_what_it_says(
    what: str, file: str, keys: set[str], stratum: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page, bands = (tmp_path / name for name in ("out.json", "page.md", "bands.yaml"))
    words = ["accuracy", what, "--data", str(ROWS.with_name(file)), "--json", str(out), "--markdown", str(page)]
    monkeypatch.setattr(sys, "argv", [*words, *(["--bands", str(bands)] if what == "throughput" else [])])
    main()
    written = json.loads(out.read_text())
    assert {"id", "relative_error", "skipped", *keys} <= set(written["rows"][0])
    assert stratum in written["strata"]
    assert page.read_text().startswith(f"# How good are {title} predictions?")
    if what == "throughput":
        assert strict_yaml.read(bands).data.keys() == {band["regime"] for band in written["bands"]}
