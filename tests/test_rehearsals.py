"""A rehearsal can fail: with faults planted in its scaled-down copy, each in the figure in which it must show."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import shutil
import string
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import kit
from kit.engines import hf_engine
from kit.errors import EngineError, RunDirectoryError
from kit.rehearsal import assets, processes, rounding
from kit.rehearsal.rehearse import Rehearsal, _check_layout, _curve, _launcher, _reference, _run, rehearse, render
from kit.rehearsal.rounding import InBf16
from kit.rehearsal.scaled_down import scaled_down
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.run import CheckpointSpec, DataSpec, RunSpec
from kit.specs.shipped import recipe_path
from kit.training.__main__ import main
from kit.training.data.indexed import IndexedTokens
from tests.emit.plans import TORCH, plan_of
from tests.planning.shapes import by_hand
from tests.support.checkpoints import InMemory
from tests.support.files import file_with
from tests.support.refusals import refusal
from tests.system import rehearsal_faults, rehearsals

NAME = "tiny-llama-pretrain-cpu-bf16"
ON_ONE = {"cluster": "1xA100-80", **TORCH, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
PLANS = {
    "pretrain": lambda: kit.plan(kit.load_recipe(recipe_path(NAME))),
    "pairs": lambda: plan_of("blenderbot-400m-distill", job={"objective": "seq2seq", "seq_length": 128}, **ON_ONE),
    "adapters": lambda: plan_of("llama-3.2-1b", job={"objective": "sft", "lora": LoraSpec(rank=8)}, **ON_ONE),
}
"""What is rehearsed → its plan, on one process."""


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that rehearses a plan, with faults: workers are this process, where a rehearsal starts launchers; the
    kill is a stop whose checkpoint is gone, so that the resumed run repeats a step too."""
    build, mean_scale = kit.engines.build_engine, hf_engine.mean_scale
    monkeypatch.setattr(kit.engines, "build_engine", build)
    monkeypatch.setattr(hf_engine, "mean_scale", mean_scale)

    def run(path: Path, *words: str) -> None:
        kit.engines.build_engine, hf_engine.mean_scale = build, mean_scale
        rehearsal_faults.plant(",".join(planted), path.name)
        assert main([str(path), *words]) in (0, 75)

    def run_until_killed(path: Path, step: int) -> int:
        run(path, "--stop-at-step", str(step))
        shutil.rmtree(path / "checkpoints" / f"step-{step:08d}")
        return step

    @contextmanager
    def beside(path: Path) -> Iterator[None]:
        run(path)
        yield

    for function in (run, run_until_killed, beside):
        monkeypatch.setattr(processes, function.__name__, function)
    planted: list[str] = []

    def rehearsed(kind: str, *faults: str) -> Rehearsal:
        planted[:] = faults
        return rehearse(kind, PLANS[kind](), None, tmp_path / "rehearsal")

    return rehearsed


@pytest.mark.parametrize("kind", PLANS)
def test_a_copy_trains_resumes_and_exports_what_plain_torch_does(kind: str, in_process: Any, tmp_path: Path) -> None:
    found = in_process(kind)
    assert found.passed
    assert found.as_json() == {**dataclasses.asdict(found), "passed": True}
    assert max(found.loss_difference, found.norm_difference, found.weight_difference) < 1e-5
    assert (found.processes, found.launcher, found.killed_at) == (1, "python", 4)
    rounded: Any = found.in_bf16
    assert 1e-6 < rounded.loss_difference < rounded.norm_difference < rounded.update_difference
    assert rounded.moment_difference > 1e-4
    assert rounded.bound == rounding.gradient_bound(4 if kind == "pairs" else 2), "two layers in each stack"
    assert f"  in bf16   8 steps, from plain torch in fp32: loss {rounded.loss_difference:.1e}" in render(found)


IN_BF16 = ("loss_difference", "norm_difference", "moment_difference", "update_difference", "rounded_masters")
CURVE, EXPORT = {"loss_difference", "norm_difference"}, {"exported_difference", "weight_difference"}
RED = {
    ("double-gradients",): ({"norm_difference"}, {"norm_difference"}),
    ("lost-optimizer-state", "double-learning-rate"): (
        CURVE | EXPORT, CURVE | {"moment_difference", "update_difference"}
    ),
    ("transposed-query", "rounded-masters"): ({"weight_difference"}, {"rounded_masters"}),
    ("doubled-head",): (CURVE | EXPORT, set()),
}  # fmt: skip
"""Faults → the figures of the run in fp32, and of that in bf16, that are beyond their bounds; the others are within."""


@pytest.mark.everyday("lost-optimizer-state-double-learning-rate", "transposed-query-rounded-masters")
@pytest.mark.parametrize("faults", rehearsal_faults.TOGETHER, ids="-".join)
def test_faults_turn_their_own_figures_red(faults: tuple[str, ...], in_process: Any) -> None:
    """Launched, and on the other engines: ``python -m tests.system.rehearsals --plant-all``."""
    found = in_process("pretrain", *faults)
    red = [
        {name for name in names if (value := rehearsals._figure(found.as_json(), part + name))[0] > value[1]}
        for part, names in (("", CURVE | EXPORT), ("in_bf16.", IN_BF16))
    ]
    assert (*red, found.passed, found.in_bf16.passed) == (*RED[faults], False, not red[1])
    assert render(found).startswith("pretrain: FAILED in ")


PASSED = Rehearsal(
    "a",
    "b",
    "c",
    2,
    "torchrun",
    (),
    1e-4,
    1e-3,
    4,
    1e-4,
    1e-3,
    9.0,
    InBf16(0.1, 0.1, 0.1, 0.2, 0.01, "bf16", bound=0.1, update_bound=0.2),
)


@pytest.mark.parametrize("figure", [*sorted(CURVE | EXPORT), *(f"in_bf16.{name}" for name in IN_BF16)])
def test_each_figure_has_a_bound_that_it_may_reach(figure: str) -> None:
    assert PASSED.passed
    place, _, name = figure.rpartition(".")
    part = getattr(PASSED, place) if place else PASSED
    beyond = dataclasses.replace(part, **{name: getattr(part, name) * 1.01})
    assert not beyond.passed
    assert not (dataclasses.replace(PASSED, **{place: beyond}) if place else beyond).passed


def steps(*numbers: int) -> str:
    return "".join(json.dumps({"step": n, "loss": 1 + i}) + "\n" for i, n in enumerate(numbers))


def test_a_curve_has_every_step_once_as_it_was_after_the_resume(tmp_path: Path) -> None:
    run = SimpleNamespace(
        path=file_with(tmp_path / "a/metrics.jsonl", steps(1, 2, 3, 4, 4, 5, 6, 7, 8) + '{"st').parent
    )
    assert {n: row["loss"] for n, row in _curve(run).items()} == {1: 1, 2: 2, 3: 3, 4: 5, 5: 6, 6: 7, 7: 8, 8: 9}
    file_with(run.path / "metrics.jsonl", steps(1, 2, 4, 5, 6, 7, 8))
    assert refusal(EngineError, _curve, run) == "a: steps [1, 2, 4, 5, 6, 7, 8] were logged, not 1 to 8"


SQUARES, BACK = 2.0**-16 * 30, 2.0**-8 + 2.0**-6
"""One layer: 2 · (12 + 3) roundings of 2⁻⁸. In fp8 four products forward and back, and the weights' gradient."""
ONE, OTHER = ({"a": torch.tensor([3.0, a]), "b": torch.tensor([b])} for a, b in ((0.0, 4.0), (3.0, 0.0)))
HELD = InMemory({"a": torch.tensor([0.0, 1.5, 1.001]), "b": torch.tensor([2.0])})
test_value = by_hand([
    ("a gradient", lambda: rounding.gradient_bound(1), math.sqrt(SQUARES / 3)),
    ("in fp8", lambda: rounding.gradient_bound(1, "fp8"),
     math.sqrt((SQUARES + 4 * (2 * 2.0**-8 + BACK) + BACK) / 3)),
    ("an update", lambda: [rounding.update_bound(0.1, eps, 1e-4) for eps in (4e-4, 1e-5)], [0.2, 0.1]),
    ("the largest of all steps", lambda: rounding.largest(
        {1: {"loss": 2.0}, 2: {"loss": 4.0}}, {1: {"loss": 2.1}, 2: {"loss": 3.0}}, "loss"), 0.25),
    ("a distance", lambda: rounding._distance(ONE, ONE.__getitem__, OTHER.__getitem__), 1.0),
    ("what was rounded", lambda: rounding._rounded_share(["a", "b"], HELD), 2 / 3),
    ("a mean square", lambda: rounding._root_mean_square(["b"], HELD), 2.0),
])  # fmt: skip


def test_settings_are_the_recipes_but_for_data_and_steps(tmp_path: Path) -> None:
    shrunk = scaled_down(PLANS["adapters"]())
    data = DataSpec(train="/theirs", validation="/held", seed=7)
    asked = RunSpec(data=data, steps=900, seed=5, checkpoint=CheckpointSpec(every_steps=50, asynchronous=True))
    found = _run(asked, shrunk, tmp_path)
    assert found.data == dataclasses.replace(
        data, train=f"{tmp_path}/data/train", validation=f"{tmp_path}/data/validation", allow_many_epochs=True
    )
    assert (found.seed, found.steps, found.nvme_path, found.model_path) == (5, 8, None, f"{tmp_path}/model")
    assert found.checkpoint == CheckpointSpec(every_steps=3, keep_last=2, asynchronous=True)
    assert (found.logging.every_steps, found.validation_sequences, found.validation_every_steps) == (1, 8, None)
    on_disks = dataclasses.replace(shrunk, pins=shrunk.pins.but(offload_optimizer="nvme"))
    assert _run(None, on_disks, tmp_path).nvme_path == f"{tmp_path}/nvme"
    assert (tmp_path / "nvme").is_dir()


def test_the_reference_is_plain_torch_and_another_layout_than_asked_for_is_no_evidence() -> None:
    shrunk = scaled_down(PLANS["adapters"]())
    layout = _reference(shrunk).layout
    assert (layout.engine, layout.zero_stage, layout.world_size, layout.micro_batch_size) == ("torch", 0, 1, 1)
    assert (layout.recompute, layout.chunked_loss, layout.compile_layers) == ("none", False, False)
    said = refusal(EngineError, _check_layout, _reference(shrunk), shrunk.pins.but(zero_stage=3))
    assert said == "zero_stage=0 was planned for the scaled-down copy, not 3"


@pytest.mark.parametrize(
    ("objective", "start", "shape"),
    [
        ("pretrain", None, [(1, None), (1, [4096])]),  # one text
        ("sft", None, [(64, [8, 16, 9, 22]), (8, [8, 16, 9, 22])]),
        ("seq2seq", 0, [(64, [8, 16, 9, 22]), (8, [8, 16, 9, 22])]),
    ],
)
def test_data_are_rows_of_unequal_length_or_one_text(
    objective: str, start: int | None, shape: list[Any], tmp_path: Path
) -> None:
    assets.write_data(JobSpec(objective=objective), tmp_path)
    sets = [IndexedTokens(tmp_path / name) for name in ("train", "validation")]
    for each, (documents, lengths) in zip(sets, shape, strict=True):
        assert (len(each.document_indices) - 1, each.sequence_lengths[:4].tolist()) == (
            documents,
            lengths or [len(each)],
        )
    assert json.loads((tmp_path / "train.json").read_text()).get("decoder_start_token_id") == start
    text = "".join(inspect.getsource(module) for module in (json, string, textwrap)).encode()
    assert [bytes(each.read(0, 8).astype("uint8")) for each in sets] == [text[4096:4104], text[:8]]


def test_an_export_that_is_not_finite_is_no_evidence(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.rehearsal.rehearse._held_out_loss", lambda *_: math.nan)
    assert "losses of the exported models are [nan, nan]" in refusal(EngineError, in_process, "pretrain")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("python -m accelerate.commands.launch x", "accelerate launch"),
        ("-m torch.distributed.run", "torchrun"),
        ("", "python"),
    ],
)
def test_a_launcher_has_the_name_that_people_know(text: str, name: str, tmp_path: Path) -> None:
    assert _launcher(SimpleNamespace(path=file_with(tmp_path / "launch.sh", text).parent)) == name


def script(place: Path, text: str) -> Path:
    file_with(place / "launch.sh", f"#!/bin/bash\n{text}\n").chmod(0o755)
    return place


def started(place: Path) -> psutil.Process:
    """The process that the run has started."""
    while not (place / "rank").exists() or not (place / "rank").read_text():
        time.sleep(0.01)
    return psutil.Process(int((place / "rank").read_text()))


def gone(place: Path) -> bool:
    return not psutil.pid_exists(int((place / "rank").read_text())) or started(place).status() == "zombie"


def test_a_run_that_does_not_end_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = """echo '{"step": 3}' > metrics.jsonl; sleep 600 & echo $! > rank; sleep 600"""
    place = script(tmp_path / "a", f"cd {tmp_path / 'a'}; {endless}")
    assert processes.run_until_killed(place, 3) == 3
    for ends, said in (
        (lambda: processes.kill_at(processes.launch(place), place, 4, 0.3), "step 4 not reached within 0.3 s"),
        (lambda: processes.finish(processes.launch(place), 0.3), "no end within 0.3 s"),
    ):
        (place / "rank").unlink(missing_ok=True)
        assert refusal(EngineError, ends) == said
        assert gone(place)

    def fails() -> None:
        (place / "rank").unlink()
        with processes.beside(place):
            assert started(place).status() != "zombie"
            raise ZeroDivisionError

    refusal(ZeroDivisionError, fails)
    assert gone(place)


def test_a_run_that_fails_says_the_errors_of_its_log(tmp_path: Path) -> None:
    text = 'for n in {1..20}; do echo "line $n"; done; echo "ValueError: 7"; echo "ChildFailedError: no"; exit 3'
    place = script(tmp_path / "a", text)
    assert refusal(EngineError, processes.run, place) == "a: exit code 3: ValueError: 7"
    assert refusal(EngineError, processes.run_until_killed, place, 1) == (
        "a: ended by itself (exit code 3) before step 1: ValueError: 7 | ValueError: 7"
    )
    with ExitStack() as stack:
        stack.enter_context(processes.beside(place))
        assert "a: exit code 3" in refusal(EngineError, stack.close)
    file_with(place / "log.txt", "".join(f"line {n}\n" for n in range(20)))
    assert (processes.tail(place), processes.metrics(place)) == (" | ".join(f"line {n}" for n in range(8, 20)), [])


def test_a_rehearsal_says_what_its_engine_lacks_before_it_starts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kit.preflight.run_checks._is_installed", lambda name: name != "deepspeed")
    recipe = kit.load_recipe(recipe_path("tiny-llama-pretrain-zero3-2xcpu"))
    assert re.search(
        r"needs deepspeed, not installed .*megatron-kit\[deepspeed\]",
        refusal(RunDirectoryError, rehearse, "a", kit.plan(recipe), recipe.run, tmp_path / "a"),
    )
    assert not list(tmp_path.rglob("log.txt"))
