"""Conversions offline: what comes out is what the engine itself reads and writes, and bad input is named."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kit.addons.importers.inspected import inspected
from kit.addons.importers.megatron.resumed import values_to_resume
from kit.engines.huggingface.models import HfDirectory, hf_config
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError, KitError
from kit.training.checkpoint.convert import convert, open_checkpoint
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.counters import START
from tests.megatron import cases, checkpoints
from tests.megatron.shapes import BY_FAMILY
from tests.support import tiny
from tests.support.checkpoints import same_state, same_tensors
from tests.support.refusals import refusal
from tests.support.workers import pool


@pytest.fixture(scope="module")
def saved(references, tmp_path_factory):
    """``saved(family) → (spec, directory of the run directories, checkpoints of two steps on TP2 (and EP2), the curve
    after them)``."""

    def save(family="llama"):
        spec = tiny.model(family, num_layers=4, vocab_size=127, **BY_FAMILY.get(family, {}))
        directory, _ = references(spec)
        layout = {"tp": 2, "sp": True} | ({"ep": 2} if spec.num_experts else {})
        rundir = cases.run_directory(directory / "run", spec, **layout)
        root = tmp_path_factory.mktemp("run")
        rundir.plan.save(root / "plan.yaml")
        curve = pool("megatron", 2).run(cases.inside, rundir, checkpoints.save, root / "checkpoints")[0]
        return spec, directory, root / "checkpoints", curve

    return lru_cache(save)


@pytest.mark.everyday("llama", "deepseek_v3")
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_a_checkpoint_as_megatron_has_it_and_back(saved, tmp_path, family):
    _, directory, root, _ = saved(family)
    convert(root / "step-00000002", "megatron", tmp_path / "megatron", dtype="bfloat16")
    convert(tmp_path / "megatron", "step", tmp_path / "step", model=str(directory / "model"))
    found, expected = Checkpoint(tmp_path / "step"), Checkpoint(root / "step-00000002")
    found.verify()
    assert found.manifest.counters.optimizer_steps == expected.manifest.counters.optimizer_steps
    assert found.manifest.kinds == cases.KINDS
    assert same_state(found, expected)


def test_inspect_says_what_to_do(saved, tmp_path):
    step = saved()[2] / "step-00000002"
    told = inspected(step)
    assert (told.format, told.step, told.adam, told.layout) == ("step", 2, True, {"world_size": 2})
    assert told.can[0] == f"kit train RUN --resume {step}"
    assert [command.split("--to ")[1].split()[0] for command in told.can[1:]] == ["hf", "universal", "megatron", "dcp"]
    convert(step, "megatron", tmp_path / "theirs")
    (command,) = inspected(tmp_path / "theirs").can
    assert command.endswith("--to step --out DIRECTORY --model MODEL, then kit train RUN --resume DIRECTORY")


READERS = {
    "dp": ("llama", "bf16", {"dp": 2}),
    "tp": ("llama", "fp32", {"tp": 2, "dp": 2}),
    "pp": ("mixtral", "fp32", {"pp": 2, "dp": 2}),
    "ep": ("mixtral", "fp32", {"dp": 2, "ep": 2}),
}
"""Layouts of runs that go on with what kit wrote: a name → (family, precision, sizes)."""


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="megatron-core 0.19.2 reads no torch_dist: docs/findings.md")
@pytest.mark.everyday("dp", "ep")
@pytest.mark.parametrize(("family", "precision", "layout"), READERS.values(), ids=READERS.keys())
def test_megatron_core_reads_what_is_written_for_it(saved, tmp_path, family, precision, layout):
    """Model, distributed optimizer and schedule, on another layout than the one that trained: every master weight and
    moment bit for bit, in fp32 beside weights in bf16 too. What is not read stays random."""
    spec, directory, root, curve = saved(family)
    rundir = cases.run_directory(
        directory / "run", spec, {"precision": precision}, model_path=None, zero_stage=1, **layout
    )
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    shutil.copytree(root / "step-00000002", step)
    rundir.plan.save(tmp_path / "run" / "plan.yaml")
    said = convert(step, "megatron", tmp_path / "out", dtype={"fp32": "float32", "bf16": "bfloat16"}[precision])
    assert said == f"a megatron checkpoint of {spec.name}, with Adam's state"
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"
    expected = {
        "differing": [],
        # Of the schedule the learning rate after 16 samples.
        "groups": [(2, (0.9, 0.95), cases.EPS, True, True, pytest.approx(1e-4 + 9e-4 * (32 - 16) / (32 - 4)))],
        "curve": pytest.approx(curve, rel=1e-3 if precision == "bf16" else 1e-5),
    }
    workers, written = pool("megatron", rundir.plan.layout.world_size), tmp_path / "out" / "iter_0000002"
    found = workers.run(cases.inside, rundir, checkpoints.read_by_megatron, written, step)
    assert found == [expected] * len(found)


def test_adams_values_away_from_a_run():
    """Those of a recipe that does not say them; experts have an optimizer of their own, as with ep > 1."""
    dense, experts = (values_to_resume(tiny.model(each), checkpoints.COUNTERS, None) for each in ("llama", "mixtral"))
    group = dense["optimizer"]["optimizer"]["param_groups"][0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.95), 1e-8)
    assert experts["optimizer"].keys() == {0, 1}


class OfAProgram(enum.Enum):
    """Stands for Megatron-LM's own classes beside its arguments."""

    KIND = 1


class Harmful:
    """Runs ``function`` where it is unpickled."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return self.function, ("harm",)


def harm(name):
    os.mkdir(name)


def left_by(saved, tmp_path, monkeypatch):
    """(A Megatron checkpoint, its common.pt, a function that converts it)."""
    monkeypatch.chdir(tmp_path)
    _, directory, root, _ = saved()
    convert(root / "step-00000002", "megatron", tmp_path / "theirs", dtype="float32")
    to_step = partial(convert, tmp_path / "theirs", "step", model=str(directory / "model"))
    return tmp_path / "theirs/iter_0000002/common.pt", to_step


def test_what_another_program_left_beside_adams_count_is_passed_over(saved, tmp_path, monkeypatch):
    """Arguments, classes that are not there, a word that would run code."""
    common, to_step = left_by(saved, tmp_path, monkeypatch)
    values = torch.load(common, weights_only=True)
    own = {
        "args": Namespace(seed=1, kind=OfAProgram.KIND),
        "rng": {OfAProgram.KIND: torch.rand(3)},
        "now": Harmful(harm),
    }
    torch.save(own | values, common)
    assert to_step(tmp_path / "step").endswith("with Adam's state")
    found = Checkpoint(tmp_path / "step").manifest.counters
    assert (found.step, found.optimizer_steps) == (2, 2)
    # What does not say its iteration has made as many steps as its optimizer.
    torch.save({"optimizer": values["optimizer"]}, common)
    to_step(tmp_path / "unsaid")
    assert Checkpoint(tmp_path / "unsaid").manifest.counters == found
    assert not (tmp_path / "harm").exists()


def test_moments_of_unknown_age_are_left_out(saved, tmp_path, monkeypatch):
    common, to_step = left_by(saved, tmp_path, monkeypatch)
    torch.save({"iteration": 2}, common)
    assert to_step(tmp_path / "step").endswith("weights only")
    torch.save({}, common)
    to_step(tmp_path / "unsaid")
    assert Checkpoint(tmp_path / "unsaid").manifest.counters == START
    # Neither in torch's format nor in its older one, a bare pickle.
    common.write_bytes(pickle.dumps(Harmful(harm)))
    assert re.search(
        r"common\.pt cannot be read .*; copy the checkpoint again",
        refusal(CheckpointError, to_step, tmp_path / "other"),
    )
    # What calls the operating system is refused as a whole.
    torch.save({"iteration": 2, "now": Harmful(os.mkdir)}, common)
    assert "common.pt names posix.mkdir, which is not in the closed list" in refusal(
        CheckpointError, to_step, tmp_path / "other"
    )
    assert not (tmp_path / "harm").exists()


@pytest.mark.everyday("phi3", "deepseek_v3")
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "qwen3_moe", "deepseek_v3"])
def test_a_hugging_face_model_there_and_back(references, tmp_path, family):
    """Also without shared experts, which are a width of 0 on disk and no layer in Megatron."""
    model = references(tiny.model(family, num_layers=4, vocab_size=127, tied_embeddings=family == "gpt2"))[0] / "model"
    assert convert(model, "megatron", tmp_path / "megatron", dtype="float32").endswith("weights only")
    convert(tmp_path / "megatron", "hf", tmp_path / "back", dtype="float32", model=str(model))
    convert(model, "step", tmp_path / "step")
    convert(tmp_path / "step", "hf", tmp_path / "again", dtype="float32")
    assert all(same_tensors(HfDirectory(tmp_path / name), HfDirectory(model)) for name in ("back", "again"))
    assert open_checkpoint(tmp_path / "step")[1].sources.keys() == {StateKind.MASTER}


def test_an_engine_starts_from_a_checkpoint_of_weights_alone(saved, tmp_path):
    spec, directory, _, _ = saved()
    convert(directory / "model", "step", tmp_path / "step")
    rundir = cases.run_directory(directory / "run", spec, pp=2, model_path=None)
    curve = pool("megatron", 2).run(cases.inside, rundir, checkpoints.after, tmp_path / "step")[0]
    whole = pool("megatron", 2).run(cases.inside, rundir, checkpoints.from_the_start, directory / "model")[0]
    assert curve == pytest.approx(whole)


def theirs(root, tmp_path):
    """A Megatron checkpoint away from its run."""
    convert(root / "step-00000002", "megatron", tmp_path / "a" / "theirs")
    return tmp_path / "a" / "theirs"


class LooksUp:
    """Stands for ``getattr(torch.Size, "mro")``: what no enumeration is may not be looked up."""

    def __reduce__(self):
        return getattr, (torch.Size, "mro")


def table_of_contents(content):
    """Source of ``BAD``: a directory with this ``.metadata``."""

    def write(_, tmp_path):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
        return tmp_path

    return write


BAD = {
    "what is no checkpoint": (
        lambda _, tmp_path: tmp_path,
        "hf",
        {},
        "is not a checkpoint: it has none of manifest.json",
    ),
    "an unknown format": (
        lambda _, tmp_path: tmp_path,
        "onnx",
        {},
        "--to onnx is unknown; use one of hf, step, universal, megatron, dcp",
    ),
    "the same format": (lambda root, _: root / "step-00000002", "step", {}, "is of format step already"),
    **{
        f"an option that would not be used: {said}": (lambda root, _: root / "step-00000002", to, options, said)
        for to, options, said in (
            ("dcp", {"dtype": "bfloat16"}, "--dtype bfloat16 with --to dcp, which holds fp32 always"),
            ("step", {"dtype": "float16"}, "--dtype float16 with --to step, which holds fp32 always"),
            ("universal", {"extras_from": Path("hf")}, "--extras-from hf with --to universal, which holds"),
            ("megatron", {"extras_from": Path("hf")}, "--extras-from hf with --to megatron, which holds"),
            ("hf", {"model": "llama-3.2-1b"}, "--model llama-3.2-1b: .* is a checkpoint of kit"),
            ("dcp", {"model": "llama-3.2-1b"}, "--model llama-3.2-1b: .* is a checkpoint of kit"),
            ("hf", {"merge_into": Path("hf")}, "holds a whole model and no adapters; omit merge_into=hf"),
            ("hf", {"extras_from": Path(__file__).parent}, r"--extras-from .* has no tokenizer; give"),
            ("dcp", {"merge_into": Path("hf")}, "--merge-into hf is for adapters and --to hf; omit it"),
        )
    },
    "a Megatron checkpoint of nobody": (theirs, "hf", {}, "add --model"),
    "a table of contents that would run code": (
        table_of_contents(Harmful(os.mkdir)),
        "hf",
        {"model": "llama-3.2-1b"},
        "names posix.mkdir, which no table of contents has",
    ),
    "a table of contents that looks up what is no enumeration": (
        table_of_contents(LooksUp()),
        "hf",
        {"model": "llama-3.2-1b"},
        "looks up mro of .*torch.Size.*, which no table of contents does",
    ),
    "another model": (
        theirs,
        "hf",
        {"model": "llama-3.2-1b"},
        "has shape|is not in the checkpoint",
    ),
}


@pytest.mark.parametrize(("source", "to", "options", "said"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_named_and_nothing_written(saved, tmp_path, source, to, options, said):
    assert re.search(said, refusal(KitError, convert, source(saved()[2], tmp_path), to, tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def test_the_model_of_a_model(saved, tmp_path):
    assert re.search(
        r"--model llama-3.2-1b: .* has a config\.json, which says its model",
        refusal(CheckpointError, convert, saved()[1] / "model", "step", tmp_path / "out", model="llama-3.2-1b"),
    )


def test_a_damaged_file(saved, tmp_path):
    shutil.copytree(saved()[2] / "step-00000002", tmp_path / "step")
    path = next((tmp_path / "step" / "model").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 10])
    assert re.search(
        r"safetensors has \d+ bytes where", refusal(CheckpointError, convert, tmp_path / "step", "hf", tmp_path / "out")
    )
    written = theirs(saved()[2], tmp_path)
    path = next(written.rglob("*.distcp"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 10])
    assert re.search(
        r"distcp is damaged|cannot be read",
        refusal(CheckpointError, convert, written, "hf", tmp_path / "out", model=str(saved()[1] / "model")),
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "sizes", "to", "said"),
    [
        ("megatron", {"num_layers": 3}, "hf", r"has shape \[4, .* and \[3, .* in the model"),
        *(
            ("dcp", {"ffn_hidden_size": 96}, to, r"mlp\.\w+\.weight has shape .* and .*96.* in the model")
            for to in ("hf", "step", "universal", "megatron")
        ),
    ],
)
def test_a_model_of_other_sizes(saved, tmp_path, form, sizes, to, said):
    """Not its first layers either; and before a format's own code reads a tensor."""
    hf_config(dataclasses.replace(saved()[0], **sizes)).save_pretrained(tmp_path / "other")
    convert(saved()[2] / "step-00000002", form, tmp_path / "theirs")
    assert re.search(
        said,
        refusal(KitError, convert, tmp_path / "theirs", to, tmp_path / "out", model=str(tmp_path / "other")),
    )


@pytest.mark.nightly
def test_the_command(saved, tmp_path):
    command = [sys.executable, "-m", "kit", "convert", "model", str(saved()[2] / "step-00000002"), "--to", "hf"]
    ran = subprocess.run([*command, "--out", str(tmp_path / "hf")], capture_output=True, text=True, check=True)
    assert "a Hugging Face model in bfloat16" in ran.stdout
    assert {tensor.dtype for tensor in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
