"""The length of a run: epochs, steps or tokens, and what a plan says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kit.api as kit
from kit.emit.run_directory import write
from kit.errors import SpecError
from kit.planner.cluster_selection import Constraints, cluster_options
from kit.planner.length import check_epochs, epochs_of, known_length, length
from kit.planner.plan import Plan
from kit.report.clusters import clusters_named
from kit.report.plan_text import render
from kit.report.summary import summary
from kit.report.view import view_of
from kit.report.what_if import compared
from kit.specs.catalog import load_model
from kit.specs.epoch import Epoch
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.recipe import load_recipe
from kit.specs.run import BatchRampSpec, BlendedSetSpec, DataSpec, RunSpec, ScheduleSpec
from kit.training.logging.metrics import model_flops_utilisation
from tests.support import tiny
from tests.support.files import file_with
from tests.support.refusals import refusal

CHATS = Epoch(samples=200, tokens=7007)


def planned(objective: str = "sft", batch: int = 8, **job: object) -> Plan:
    return tiny.plan(
        micro_batch_size=batch, job={"objective": objective, "seq_length": 500, "total_tokens": None, **job}
    )


def run(**keys: object) -> RunSpec:
    return tiny.run_directory_spec(**({"schedule": ScheduleSpec(warmup_steps=0)} | keys))


@pytest.mark.parametrize(
    ("epochs", "batch", "steps"),
    [(4.0, 8, 100), (1.0, 64, 4), (0.5, 8, 13), (0.1, 10, 2), (3.0, 7, 86), (0.001, 8, 1)],
)
def test_steps_of_epochs_are_rows_over_the_batch_rounded_up(epochs, batch, steps):
    assert length(planned(batch=batch, epochs=epochs), run(), CHATS) == (steps, steps * batch)


@pytest.mark.parametrize(
    ("epochs", "tokens", "steps"),
    [(4, 4 * 7007, 100), (1, 7007, 25), (1 / 2, 3503, 12), (0, 1, 1)],  # 99.99 of 100 rows; at least a step
)
def test_tokens_of_rows_are_their_own_and_not_padding(epochs, tokens, steps):
    """Four epochs of 200 rows with 7,007 tokens were 28,028 / (500 · 8) = 7 steps. Text needs no data."""
    assert length(planned(total_tokens=tokens), run(), CHATS)[0] == steps
    assert known_length(planned("pretrain", total_tokens=28_028), run()) == (7, 56)
    assert length(planned("pretrain", epochs=2.0), run(), Epoch(samples=201, tokens=100_500))[0] == 51


@pytest.mark.parametrize(("epochs", "expected"), [(0.2, (9, 44)), (0.16, (7, 32)), (0.01, (1, 4))])
def test_a_batch_ramp_ends_with_the_epochs(epochs, expected):
    """Five batches of 4, then of 6 until 40 are reached: 0.2 times 200 rows end in the fourth of these."""
    ramp = BatchRampSpec(start=4, increment=2, samples=40)
    plan = tiny.plan(
        micro_batch_size=2,
        gradient_accumulation_steps=4,
        job={"objective": "sft", "total_tokens": None, "epochs": epochs},
    )
    assert length(plan, run(schedule=ScheduleSpec(warmup_steps=0, batch_ramp=ramp)), CHATS) == expected


def test_a_set_without_a_length_is_seen_as_often_as_is_usual(tmp_path):
    epochs = {"pretrain": 1, "sft": 3, "seq2seq": 3, "dpo": 1, "kto": 1, "reward": 1, "grpo": 1}
    assert {objective: epochs_of(planned(objective), run()) for objective in epochs} == epochs
    assert epochs_of(planned(epochs=2.0), run()) == 2
    assert epochs_of(planned(), run(steps=5)) is None is epochs_of(planned(total_tokens=5), run())
    assert length(planned(), run(), CHATS) == length(planned(epochs=3.0), run(), CHATS)
    assert known_length(planned(), run(steps=5)) == (5, 40)
    assert known_length(planned(epochs=2.0), run()) is None


@pytest.mark.parametrize(
    ("job", "keys", "said"),
    [
        *(({"objective": objective}, {}, "none of job.epochs, run.steps and job.total_tokens .* job.epochs=3")
          for objective in ("pretrain", "sft", "seq2seq")),
        ({"epochs": 2.0}, {}, r"job\.epochs=2 with run\.data\.blend.*use run\.steps or job\.total_tokens"),
        ({"epochs": 2.0}, {"steps": 5}, "run.steps=5 and job.epochs=2"),
    ],
)  # fmt: skip
def test_a_length_that_a_blend_cannot_have_is_refused_with_the_fix(job, keys, said, tmp_path):
    blended = run(data=DataSpec(blend={"a": BlendedSetSpec(path="x", weight=1.0)}), **keys)
    assert re.search(said, refusal(SpecError, known_length, planned(**job), blended))
    assert re.search(said, refusal(SpecError, write, planned(**job), blended, tmp_path / "run"))
    assert known_length(planned(), run(data=DataSpec())) is None  # a script that reads its own


def recipe(tmp_path: Path, text: str) -> Path:
    return file_with(tmp_path / "recipe.yaml", f"model: llama-3.1-8b\ncluster: 8xH100\n{text}")


@pytest.mark.parametrize(
    ("job", "keys", "refused"),
    [
        ({"epochs": 20.0}, {}, False),
        ({"epochs": 20.5}, {}, True),
        ({}, {"steps": 501}, False),  # its last step begins with the 20th epoch's end
        ({}, {"steps": 502}, True),
        ({"total_tokens": 10**11}, {}, True),
    ],
)
def test_more_than_twenty_epochs_ask_for_a_key(job, keys, refused):
    plan, meant = planned(**job), DataSpec(train="nowhere", allow_many_epochs=True)
    check_epochs(plan, run(data=meant, **keys), CHATS)
    if not refused:
        return check_epochs(plan, run(**keys), CHATS)
    assert re.search(
        r"epochs.*run\.data\.allow_many_epochs=true", refusal(SpecError, check_epochs, plan, run(**keys), CHATS)
    )
    return None


def chats(tmp_path: Path, objective: str = "sft") -> None:
    said = {"objective": objective, "num_documents": 1000, "num_tokens": 300_000}
    (tmp_path / "chats.json").write_text(json.dumps(said))


def test_a_plan_knows_the_days_of_rows_that_it_can_count(tmp_path):
    job = "job: {objective: sft, global_batch_size: 128, epochs: 3}\nrun: {data: {train: chats}}"
    unknown = kit.plan(load_recipe(recipe(tmp_path, job)))
    assert (unknown.predicted.days, unknown.predicted.cost_usd, unknown.predicted.num_steps) == (None, None, None)
    assert "\n  1B tok    in full sequences: " in summary(view_of(unknown))
    assert " for 1B tokens in full sequences; $" in render(view_of(unknown))
    chats(tmp_path)
    known = kit.plan(load_recipe(recipe(tmp_path, job)))
    assert known.digest == unknown.digest
    assert known.predicted.days == pytest.approx(24 * known.predicted.step_time_s / 86400)  # 3,000 / 128 = 23.4
    assert "3 epochs, 24 steps: at most " in summary(view_of(known))
    chats(tmp_path, "seq2seq")
    assert kit.plan(load_recipe(recipe(tmp_path, job))).predicted.days is None


def test_what_a_change_does_to_the_days_of_the_same_rows(tmp_path):
    chats(tmp_path)
    path = recipe(tmp_path, "job: {objective: sft, global_batch_size: 128, epochs: 3}\nrun: {data: {train: chats}}")
    before = kit.plan(load_recipe(path))
    after = kit.plan(load_recipe(path).model, "8xH100", load_recipe(path, ["job.global_batch_size=256"]).job)
    days = next(row for row in compared(before, after) if row[0] == "days")
    assert days[2] == pytest.approx(12 * after.predicted.step_time_s / 86400)
    by_steps = kit.plan(load_recipe(recipe(tmp_path, "run: {data: {train: x}, steps: 60}"))).predicted
    assert by_steps.days == pytest.approx(60 * by_steps.step_time_s / 86400)


def test_utilisation_counts_tokens_within_their_rows():
    """A step at the plan's speed has the plan's MFU; half of its tokens, in rows half as long, less than half."""
    plan = kit.plan("llama-3.1-8b", "8xH100", JobSpec(objective="sft", seq_length=8192, global_batch_size=64))
    speed, model = plan.predicted.tokens_per_s, plan.model
    assert model_flops_utilisation(plan, speed, 8192) == pytest.approx(plan.predicted.mfu)
    half = model_flops_utilisation(plan, speed / 2, 4096)
    # 6 FLOPs for each of the matrices' 7.504e9 parameters; 6·s·4096 of attention in each of 32 layers (causal half)
    matrices, attention = 6 * 7.504e9, 6 * model.num_layers * 4096
    expected = plan.predicted.mfu / 2 * (matrices + 4096 * attention) / (matrices + 8192 * attention)
    assert half == pytest.approx(expected, rel=1e-3)


def test_no_cluster_has_days_of_rows_that_nobody_counted():
    rows = JobSpec(objective="sft", epochs=3.0)
    (found,) = kit.compare_clusters("llama-3.1-8b", clusters_named(["16xH100"]), rows)
    assert (found.days, found.layout is None) == (None, False)
    assert "their number is not known; give --total-tokens" in refusal(
        SpecError, cluster_options, load_model("llama-3.1-8b"), rows, Pins(), Constraints(deadline_days=3.0)
    )
