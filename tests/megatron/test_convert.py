"""Conversions offline: what comes out is what the engine itself reads and writes, and bad input is named."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from kit.engines.base import StateKind
from kit.engines.huggingface.models import HfDirectory, hf_config
from kit.errors import CheckpointError, KitError
from kit.training.checkpoint.convert import convert, open_checkpoint
from kit.training.checkpoint.engine_checkpoint import MANIFEST
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.checkpoint.foreign.recognise import inspected
from tests.megatron import cases, checkpoints
from tests.support import tiny
from tests.support.workers import pool


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def saved(request, references, tmp_path_factory):
    """(spec, directory of the run directories, checkpoints of two steps on TP2 (and EP2), the curve after them)."""
    spec = tiny.model(request.param, num_layers=4, vocab_size=127)
    directory, _ = references(spec)
    layout = {"tp": 2, "sp": True} | ({"ep": 2} if spec.num_experts else {})
    rundir = cases.run_directory(directory / "run", spec, **layout)
    root = tmp_path_factory.mktemp("run")
    rundir.plan.save(root / "plan.yaml")
    curve = pool("megatron", 2).run(checkpoints.save, rundir, root / "checkpoints")[0]
    return spec, directory, root / "checkpoints", curve


def same(found, expected):
    assert sorted(found.names()) == sorted(expected.names())
    return all(torch.equal(found.read(name).float(), expected.read(name).float()) for name in expected.names())


@pytest.mark.everyday("llama")
def test_a_native_checkpoint_becomes_the_exchange_checkpoint_that_the_engine_writes(saved, tmp_path):
    _, _, root, _ = saved
    convert(root / "step-00000002", "exchange", tmp_path / "exchange")
    found, expected = ExchangeCheckpoint(tmp_path / "exchange"), ExchangeCheckpoint(root / "exchange")
    found.verify()
    assert (found.counters, found.model) == (expected.counters, expected.model)
    for kind in checkpoints.KINDS:
        assert same(found.source(kind), expected.source(kind))


def test_inspect_proposes_the_conversion_only_of_megatrons_own_files(saved, tmp_path):
    native = saved[2] / "step-00000002"
    assert any("--to exchange" in command for command in inspected(native).can)
    (tmp_path / "state").mkdir()  # as an engine with files of its own leaves it
    shutil.copyfile(native / MANIFEST, tmp_path / MANIFEST)
    assert list(inspected(tmp_path).can) == ["kit train RUN --resume auto"]


def test_an_exchange_checkpoint_becomes_one_that_the_engine_resumes(saved, tmp_path):
    spec, directory, root, curve = saved
    words = convert(root / "exchange", "megatron", tmp_path / "out", dtype="float32")
    assert words == f"a megatron checkpoint of {spec.name}, with Adam's state"
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"
    rundir = cases.run_directory(directory / "run", spec, pp=2)
    found = pool("megatron", 2).run(checkpoints.load_plain, rundir, tmp_path / "out" / "iter_0000002")[0]
    assert found == pytest.approx(curve, rel=1e-4)


def test_megatron_core_reads_what_is_written(saved, tmp_path):
    """megatron-core's own loader reads its own names and shapes, on another layout than the one that wrote them."""
    spec, directory, root, _ = saved
    convert(root / "exchange", "megatron", tmp_path / "out", dtype="float32")
    rundir = cases.run_directory(directory / "run", spec, pp=2)
    for path in (root / "step-00000002" / "state", tmp_path / "out" / "iter_0000002"):
        differing = pool("megatron", 2).run(checkpoints.read_by_megatron, rundir, path, root / "exchange")
        assert differing == [[], []]
    # Adam's state under the names that its distributed optimizer gives it.
    names = {"param": StateKind.MASTER, "exp_avg": StateKind.EXP_AVG, "exp_avg_sq": StateKind.EXP_AVG_SQ}
    found = {f"optimizer.state.{name}.decoder.final_layernorm.weight": torch.empty(spec.hidden_size) for name in names}
    dcp.load(found, checkpoint_id=tmp_path / "out" / "iter_0000002", no_dist=True)
    for tensor, kind in zip(found.values(), names.values(), strict=True):
        assert torch.equal(tensor, ExchangeCheckpoint(root / "exchange").source(kind).read("model.norm.weight")), kind


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


@pytest.mark.parametrize("several", [False, True])
def test_what_another_program_left_beside_adams_count_is_passed_over(saved, tmp_path, monkeypatch, several):
    """Arguments, classes that are not there, a word that would run code; with experts an optimizer each."""
    monkeypatch.chdir(tmp_path)
    _, directory, root, _ = saved
    convert(root / "exchange", "megatron", tmp_path / "theirs", dtype="float32")
    common = tmp_path / "theirs/iter_0000002/common.pt"
    values = torch.load(common, weights_only=True)
    if several:
        values["optimizer"] = {0: values["optimizer"], 1: values["optimizer"]}
    own = {
        "args": Namespace(seed=1, kind=OfAProgram.KIND),
        "rng": {OfAProgram.KIND: torch.rand(3)},
        "now": Harmful(harm),
    }
    torch.save(own | values, common)
    words = convert(tmp_path / "theirs", "exchange", tmp_path / "exchange", model=str(directory / "model"))
    assert words.endswith("with Adam's state")
    found = ExchangeCheckpoint(tmp_path / "exchange").counters
    assert (found.step, found.optimizer_steps) == (2, 2)
    if several:  # what does not say its iteration has made as many steps as its optimizer
        torch.save({"optimizer": values["optimizer"]}, common)
        convert(tmp_path / "theirs", "exchange", tmp_path / "unsaid", model=str(directory / "model"))
        assert ExchangeCheckpoint(tmp_path / "unsaid").counters == found
    assert not (tmp_path / "harm").exists()


def test_moments_of_unknown_age_are_left_out(saved, tmp_path, monkeypatch):
    _, directory, root, _ = saved
    convert(root / "exchange", "megatron", tmp_path / "theirs", dtype="float32")
    torch.save({"iteration": 2}, tmp_path / "theirs/iter_0000002/common.pt")
    words = convert(tmp_path / "theirs", "exchange", tmp_path / "exchange", model=str(directory / "model"))
    assert words.endswith("weights only")
    monkeypatch.chdir(tmp_path)
    # Neither in torch's format nor in its older one, a bare pickle.
    (tmp_path / "theirs/iter_0000002/common.pt").write_bytes(pickle.dumps(Harmful(harm)))
    with pytest.raises(CheckpointError, match=r"common\.pt cannot be read .*; copy the checkpoint again"):
        convert(tmp_path / "theirs", "exchange", tmp_path / "other", model=str(directory / "model"))
    # What calls the operating system is refused as a whole.
    torch.save({"iteration": 2, "now": Harmful(os.mkdir)}, tmp_path / "theirs/iter_0000002/common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt names posix\.mkdir, which is not in the closed list"):
        convert(tmp_path / "theirs", "exchange", tmp_path / "other", model=str(directory / "model"))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "qwen3_moe"])
def test_a_hugging_face_model_there_and_back(references, tmp_path, family):
    spec = tiny.model(family, num_layers=4, vocab_size=127, tied_embeddings=family == "gpt2")
    model = references(spec)[0] / "model"
    assert convert(model, "megatron", tmp_path / "megatron", dtype="float32").endswith("weights only")
    convert(tmp_path / "megatron", "hf", tmp_path / "back", dtype="float32", model=str(model))
    convert(model, "exchange", tmp_path / "exchange")
    convert(tmp_path / "exchange", "hf", tmp_path / "again", dtype="float32")
    for path in (tmp_path / "back", tmp_path / "again"):
        assert same(HfDirectory(path), HfDirectory(model))
    assert open_checkpoint(tmp_path / "exchange").sources.keys() == {StateKind.MASTER}


def test_an_engine_starts_from_an_exchange_checkpoint_of_weights_alone(saved, tmp_path):
    spec, directory, _, _ = saved
    convert(directory / "model", "exchange", tmp_path / "exchange")
    rundir = cases.run_directory(directory / "run", spec, pp=2, model_path=None)
    curve = pool("megatron", 2).run(checkpoints.through_the_exchange_checkpoint, rundir, tmp_path)[0]
    assert curve == pytest.approx(pool("megatron", 2).run(checkpoints.from_the_start, rundir, directory / "model")[0])


class TestBadInput:
    def test_what_is_no_checkpoint(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"is not a checkpoint: neither exchange.json"):
            convert(tmp_path, "hf", tmp_path / "out")

    def test_an_unknown_format(self, tmp_path):
        with pytest.raises(CheckpointError, match="--to onnx is unknown; use one of hf, exchange, megatron, dcp"):
            convert(tmp_path, "onnx", tmp_path / "out")

    def test_the_same_format(self, saved, tmp_path):
        with pytest.raises(CheckpointError, match="is of format exchange already"):
            convert(saved[2] / "exchange", "exchange", tmp_path / "out")

    @pytest.mark.parametrize(
        ("to", "options", "said"),
        [
            ("dcp", {"dtype": "bfloat16"}, "--dtype bfloat16 with --to dcp, which holds fp32 always"),
            ("exchange", {"dtype": "float16"}, "--dtype float16 with --to exchange, which holds fp32 always"),
            ("universal", {"extras_from": Path("hf")}, "--extras-from hf with --to universal, which holds"),
            ("megatron", {"extras_from": Path("hf")}, "--extras-from hf with --to megatron, which holds"),
            ("hf", {"model": "llama-3.2-1b"}, "--model llama-3.2-1b: .* is an exchange checkpoint"),
            ("dcp", {"model": "llama-3.2-1b"}, "--model llama-3.2-1b: .* is an exchange checkpoint"),
            ("hf", {"merge_into": Path("hf")}, "holds a whole model and no adapters; omit merge_into=hf"),
        ],
    )
    def test_an_option_that_would_not_be_used(self, saved, tmp_path, to, options, said):
        with pytest.raises(CheckpointError, match=said):
            convert(saved[2] / "exchange", to, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    def test_a_directory_without_a_tokenizer_to_copy(self, saved, tmp_path):
        with pytest.raises(CheckpointError, match=r"--extras-from .* has no tokenizer; give"):
            convert(saved[2] / "exchange", "hf", tmp_path / "out", extras_from=tmp_path)
        assert not (tmp_path / "out").exists()

    def test_the_model_of_a_model(self, saved, tmp_path):
        with pytest.raises(CheckpointError, match=r"--model llama-3.2-1b: .* has a config\.json, which says its model"):
            convert(saved[1] / "model", "exchange", tmp_path / "out", model="llama-3.2-1b")

    def test_a_megatron_checkpoint_of_nobody(self, saved, tmp_path):
        shutil.copytree(saved[2] / "step-00000002", tmp_path / "a" / "step")
        with pytest.raises(CheckpointError, match="add --model"):
            convert(tmp_path / "a" / "step", "hf", tmp_path / "out")

    def test_a_damaged_file(self, saved, tmp_path):
        shutil.copytree(saved[2].parent, tmp_path / "run")
        directory = tmp_path / "run" / "checkpoints" / "step-00000002"
        path = next((directory / "state").glob("*.distcp"))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 10])
        with pytest.raises(CheckpointError, match=r"distcp has \d+ bytes where"):
            convert(directory, "hf", tmp_path / "out")
        (directory / "manifest.json").unlink()  # as another program would have left it
        with pytest.raises(CheckpointError, match="cannot be read"):
            convert(directory, "hf", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_table_of_contents_that_would_run_code(self, saved, tmp_path):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful(os.mkdir)))
        with pytest.raises(CheckpointError, match=r"names posix.mkdir, which no table of contents has"):
            convert(tmp_path, "hf", tmp_path / "out", model=str(saved[1] / "model"))

    def test_another_model(self, saved, tmp_path):
        root = saved[2]
        other = "llama-3.2-1b"
        with pytest.raises(KitError, match=r"has shape|is not in the checkpoint"):
            convert(root / "step-00000002", "hf", tmp_path / "out", model=other)

    def test_a_smaller_model(self, saved, tmp_path):
        """Not its first layers either."""
        spec, _, root, _ = saved
        hf_config(dataclasses.replace(spec, num_layers=3)).save_pretrained(tmp_path / "small")
        with pytest.raises(KitError, match=r"has shape \[4, .* and \[3, .* in the model"):
            convert(root / "step-00000002", "hf", tmp_path / "out", model=str(tmp_path / "small"))


@pytest.mark.everyday("llama")
def test_the_command(saved, tmp_path):
    command = [sys.executable, "-m", "kit", "convert", "model", str(saved[2] / "step-00000002"), "--to", "hf"]
    ran = subprocess.run([*command, "--out", str(tmp_path / "hf")], capture_output=True, text=True, check=True)
    assert "a Hugging Face model in bfloat16" in ran.stdout
    assert {tensor.dtype for tensor in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
