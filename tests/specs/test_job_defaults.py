"""What a job gets where nobody says it: by objective, method, model and number of GPUs."""

import pytest

from kit.cli.options import job_for
from kit.planner.schedule import learning_rate, warmup, with_usual_warmup
from kit.specs.catalog import load_model
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.job_defaults import defaults_of, with_defaults
from kit.specs.recipe import load_recipe
from kit.specs.run import RunSpec, ScheduleSpec
from tests.support.files import file_with

LLAMA, GPT2, T5 = (load_model(name) for name in ("llama-3.1-8b", "gpt2", "t5-small"))
ROWS = {  # objective, adapters → length, batch, rate, warm-up, epochs
    ("pretrain", False): (4096, 512, 3e-4, 2000, 1),
    ("sft", False): (4096, 128, 2e-5, 0.03, 3),
    ("sft", True): (2048, 16, 2e-4, 0.03, 3),
    ("pretrain", True): (2048, 16, 2e-4, 0.03, 3),
    ("seq2seq", False): (512, 128, 1e-4, 0.0, 3),
    ("dpo", False): (1024, 64, 5e-7, 0.1, 1),
    ("dpo", True): (1024, 64, 5e-6, 0.1, 1),
    ("kto", False): (1024, 64, 5e-7, 0.1, 1),
    ("reward", True): (2048, 64, 9e-5, 0.0, 1),
    ("grpo", False): (1024, 64, 1e-6, 0.0, 1),
}


@pytest.mark.parametrize(("asked", "expected"), ROWS.items(), ids=str)
def test_each_objective_and_method_has_its_own(asked, expected):
    row = defaults_of(*asked)
    found = (row.seq_length, row.global_batch_size, row.learning_rate, row.warmup_steps, row.epochs)
    assert found == pytest.approx(expected)
    assert "arXiv" in row.source or "TRL" in row.source


@pytest.mark.parametrize(
    ("given", "model", "gpus", "expected"),
    [
        ({}, LLAMA, 8, ("pretrain", 4096, 512)),
        ({}, GPT2, 8, ("pretrain", 1024, 512)),  # no longer than its positions
        ({}, T5, 1, ("seq2seq", 512, 128)),
        ({"lora": {}}, LLAMA, 8, ("sft", 2048, 16)),
        ({"lora": {}}, LLAMA, 16, ("sft", 2048, 16)),
        ({"lora": {}}, LLAMA, 17, ("sft", 2048, 32)),  # a row for each GPU
        ({"lora": None}, LLAMA, 64, ("pretrain", 4096, 512)),
        ({"lora": {}, "objective": "pretrain"}, LLAMA, 1, ("pretrain", 2048, 16)),
        ({"objective": "sft", "seq_length": 7, "global_batch_size": 3}, LLAMA, 64, ("sft", 7, 3)),  # what is said stays
    ],
)
def test_what_is_silent_is_filled_in(given, model, gpus, expected):
    found = with_defaults(given, model, gpus)
    assert (found["objective"], found["seq_length"], found["global_batch_size"]) == expected


def test_an_unknown_objective_is_left_to_the_parser():
    assert with_defaults({"objective": "sftt"}, LLAMA) == {"objective": "sftt"}


def test_options_and_recipes_get_the_same(tmp_path):
    recipe = file_with(tmp_path / "r.yaml", "model: llama-3.1-8b\ncluster: 8xH100\njob: {objective: sft}\n")
    assert (
        load_recipe(recipe).job
        == job_for(LLAMA, 8, objective="sft")
        == JobSpec(objective="sft", global_batch_size=128, learning_rate=2e-5)
    )
    assert job_for(LLAMA, 8, qlora=True).lora == LoraSpec(four_bit=True)
    assert load_recipe(recipe, ["job.lora={}", "job.learning_rate=1e-6"]).job.learning_rate == 1e-6


def test_the_warm_up_is_a_number_of_steps_or_a_share():
    assert [warmup(ScheduleSpec(warmup_steps=steps), 1000, step) for steps, step in ((50, 1), (50, 8), (0.03, 8))] == [
        50, 100, 30,  # a number of steps is at most a tenth of the run
    ]  # fmt: skip
    assert warmup(ScheduleSpec(warmup_steps=0.5), 1000) == 500
    assert warmup(ScheduleSpec(), 10**6) == 2000
    asked = {"peak": 1.0, "total_steps": 100, "global_batch_size": 8}
    rates = [learning_rate(seen, schedule=ScheduleSpec(warmup_steps=0.05), **asked) for seen in (8, 32, 40)]
    assert rates == pytest.approx([0.2, 0.8, 1.0])


def test_a_run_gets_the_warm_up_of_its_objective():
    assert [
        with_usual_warmup(RunSpec(), job).schedule.warmup_steps
        for job in (JobSpec(), JobSpec(objective="sft"), JobSpec(objective="dpo"))
    ] == [2000, 0.03, 0.1]
    assert with_usual_warmup(RunSpec(schedule=ScheduleSpec(warmup_steps=0)), JobSpec()).schedule.warmup_steps == 0
