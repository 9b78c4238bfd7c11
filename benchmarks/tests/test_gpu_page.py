"""The page says whose rows it shows, what they are compared with, and what is missing."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import page, run
from tests.support.refusals import refusal

PART = {
    "date": "2026-01-01T10:00:00+00:00",
    "commit": "a1",
    "changed": False,
    "load": 0.5,
    "device": "cuda",
    "hardware": {"name": "H200"},
    "python": "3.12",
    "versions": {"torch": "2.13.0", "deepspeed": None},
    "minutes": 8.0,
    "seconds": 470.0,
    "only": "",
    "without": [],
    "doctor": "ok gpus",
}


def case(name, step_s, **more):
    return {
        "name": name,
        "status": "ok",
        "part": 1,
        "layout": {"implementation": "huggingface"},
        "predicted_allocated_gib": 40.0,
        "measured_allocated_gib": 41.0,
        "memory_ratio": 1.025,
        "predicted_step_s": 8.0,
        "measured_step_s": step_s,
        "step_ratio": step_s / 8.0,
        "predicted_mfu": 0.5,
        "mfu": 0.48,
        "waits": 1,
        **more,
    }


def peer(name, step_s, **more):
    return {"name": name, "status": "ok", "part": 1, "measured_step_s": step_s, "mfu": 0.4, "flags": {}, **more}


FULL = {"name": "3B, torch", "part": 1, "status": "out of memory", "why": "8 GiB | all"}


def on_a_gpu():
    return {
        "parts": [PART],
        "rows": {
            "predicted": [case("1B, torch", 8.4), FULL],
            "side by side": [
                peer("kit train, torch", 8.5, loop_s=0.01),
                peer("Hugging Face Trainer, defaults", 12.75),
                peer("plain PyTorch", 10.0),
                peer("kit train, torch, eager mode", 10.1, loop_s=0.01),
            ],
        },
    }


def lacks(result, *lines):
    """Those of the lines that the page has not."""
    text = page.page(result)
    return [line for line in lines if line not in text]


def test_ratios_are_of_the_same_run():
    assert not lacks(
        on_a_gpu(),
        "| Hugging Face Trainer, defaults | 12.75 | 1.500 | 40.0% |",
        "| 1B, torch | huggingface | 40 | 41 | 1.025 | 8 | 8.4 | 1.050 | 50.0% | 48.0% |  | 1 |",
        "| kit train, torch | 1B, torch (engine alone) | 8.5 | 8.4 | 1.012 | 0.01 |",
        "| kit train, torch, eager mode | plain PyTorch | 10.1 | 10 | 1.010 | 0.01 |",
        "| predicted | 3B, torch | out of memory | 8 GiB \\| all |",
    )


def test_a_dry_run_says_so_and_orders_nothing():
    assert not lacks(
        on_a_gpu() | {"parts": [PART | {"device": "cpu"}]},
        "no figure here is a GPU's",
        "| Hugging Face Trainer, defaults | 12.75 |  |",
        "| kit train, torch | 1B, torch (engine alone) | 8.5 | 8.4 |  |",
    )


def test_every_part_is_named_with_its_own_time_commit_versions_and_rows():
    result = on_a_gpu()
    later = {"date": "2026-01-01T12:00:00+00:00", "seconds": 9.4, "only": "8B", "without": ["on disk"]}
    result["parts"].append(PART | later | {"versions": {"torch": "2.13.1"}, "changed": True, "doctor": "ok disk"})
    result["rows"]["predicted"].append(case("8B, LoRA", 3.0, part=2))
    asked = 'only "8B", without "on disk"'
    assert not lacks(
        result,
        "## 2 parts, one after the other",
        "| 1 | 2026-01-01T10:00:00+00:00 | a1 | 470 | 8 | all rows | 2 predicted, 4 side by side | 0.5 |",
        f"| 2 | 2026-01-01T12:00:00+00:00 | a1 with changes | 9.4 | 8 | {asked} | 1 predicted | 0.5 |",
        "Part 1: name H200. Python 3.12, torch 2.13.0.",
        "Part 2: name H200. Python 3.12, torch 2.13.1.",
        "## kit doctor, before part 2\n\n```\nok disk\n```",
    )


def kept(tmp_path, rows, part):
    """What of an earlier result of ``PART`` with these rows goes on in such a part."""
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({"parts": [PART], "rows": rows}))
    return run.kept(file, part)


def test_going_on_keeps_what_is_ok_and_of_the_same_commit(tmp_path):
    rows = {
        "predicted": [{"name": "x", "status": "ok"}, {"name": "y", "status": "too slow"}],
        "devices": [{"status": "ok"}],
    }
    assert kept(tmp_path, rows, PART) == {"parts": [PART], "rows": {"predicted": [{"name": "x", "status": "ok"}]}}


@pytest.mark.parametrize("other", [{"commit": "b2"}, {"hardware": {"name": "H100"}}, {"changed": True}])
def test_rows_of_another_version_or_machine_are_refused(tmp_path, capsys, other):
    assert refusal(SystemExit, kept, tmp_path, {}, PART | other) == "2"
    assert "error: --add" in capsys.readouterr().err
