"""Megatron-LM's old format is read as it was written: every tensor, the curve after it, and damage by name."""

from __future__ import annotations

import functools
import pickle
import re
import shutil
from argparse import Namespace

import pytest
import torch

from kit.addons.importers.inspected import inspected
from kit.engines.megatron.model.transformer_engine import _PLAIN
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.manifest import FOLDERS, Checkpoint
from tests.megatron import cases, checkpoints, torch_format
from tests.support import tiny
from tests.support.alone import process_group_of_one
from tests.support.checkpoints import change, edit, flipped, same_state, same_tensors
from tests.support.refusals import refusal
from tests.support.workers import pool

# family and changes, layout that wrote the files
WRITERS = {
    "1": ({"family": "llama"}, {}),
    "tp2": ({"family": "llama"}, {"tp": 2, "sp": True}),
    "tp2-dp2": ({"family": "qwen2"}, {"tp": 2, "dp": 2}),
    "pp2-vp2": ({"family": "gpt2"}, {"pp": 2, "vp": 2}),
    "tp2-pp2": ({"family": "qwen3", "tied_embeddings": True}, {"tp": 2, "sp": True, "pp": 2}),
    "tp4": ({"family": "llama"}, {"tp": 4, "sp": True}),
    "tp2-bf16": ({"family": "llama"}, {"tp": 2, "job": {"precision": "bf16"}}),
    "experts-pp2": ({"family": "mixtral"}, {"pp": 2}),
}


@pytest.fixture(scope="module")
def written(references, tmp_path_factory):
    """``written(name) → (spec, directory beside the run directories, root of the checkpoint, curve after it)``."""

    @functools.cache
    def write(name):
        changes, layout = WRITERS[name]
        spec, root = tiny.model(num_layers=4, vocab_size=127, **changes), tmp_path_factory.mktemp("old")
        directory, _ = references(spec)
        rundir = cases.run_directory(directory / "run", spec, **layout)
        workers = pool("megatron", rundir.plan.layout.world_size)
        return spec, directory, root, workers.run(cases.inside, rundir, torch_format.save, root)[0]

    return write


@pytest.mark.everyday("tp2-pp2", "pp2-vp2")
@pytest.mark.parametrize("name", WRITERS)
def test_every_tensor_is_the_one_that_the_engine_has(written, tmp_path, name):
    _, directory, root, _ = written(name)
    said = convert(root / "megatron", "step", tmp_path / "step", model=str(directory / "model"))
    assert said.endswith("with Adam's state")
    found, expected = Checkpoint(tmp_path / "step"), Checkpoint(root / "expected")
    counters = found.manifest.counters
    assert (counters.step, counters.optimizer_steps, counters.samples_seen) == (2, 2, 16)
    assert found.manifest.kinds == tuple(FOLDERS)
    assert same_state(found, expected)


@pytest.mark.everyday("tp2-pp2-megatron")
@pytest.mark.parametrize(("name", "engine"), [("1", "torch"), ("tp2", "torch"), ("tp2-pp2", "megatron")])
def test_the_curve_goes_on_and_with_a_swapped_rank_it_does_not(written, tmp_path, name, engine):
    spec, directory, root, expected = written(name)

    def curve(checkpoint, out):
        convert(checkpoint, "step", out, model=str(directory / "model"))
        layout = {"engine": "torch", "implementation": "huggingface"} if engine == "torch" else {"pp": 2}
        rundir = cases.run_directory(directory / "run", spec, **layout)
        if engine == "torch":
            with process_group_of_one():
                return cases.inside(rundir, checkpoints.after, out)
        return pool("megatron", 2).run(cases.inside, rundir, checkpoints.after, out)[0]

    assert curve(root / "megatron", tmp_path / "step") == pytest.approx(expected, rel=1e-5)
    if name == "1":
        return
    shutil.copytree(root / "megatron", tmp_path / "swapped")
    first, second = sorted((tmp_path / "swapped/iter_0000002").iterdir())[:: 2 if "pp" in name else 1]
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    assert curve(tmp_path / "swapped", tmp_path / "other") != pytest.approx(expected, rel=1e-3)


def test_it_becomes_a_hugging_face_model_and_inspect_says_what_it_is(written, tmp_path):
    _, directory, root, _ = written("tp2-pp2")
    found = inspected(root / "megatron")
    assert (found.program, found.format, found.step, found.adam) == (
        "Megatron-LM: old torch format",
        "megatron-old",
        2,
        True,
    )
    assert (found.layout, found.samples_seen) == ({"tp": 2, "pp": 2}, 16)
    assert found.hyperparameters[0]["lr"] == cases.LEARNING_RATE
    convert(root / "megatron", "hf", tmp_path / "hf", dtype="float32", model=str(directory / "model"))
    convert(tmp_path / "hf", "step", tmp_path / "step")
    weights = Checkpoint(tmp_path / "step").source(StateKind.MASTER)
    assert same_tensors(weights, Checkpoint(root / "expected").source(StateKind.MASTER))


def test_names_of_transformer_engines_fused_norms_are_read(written, tmp_path):
    """Its layers need a GPU, so the names are edited."""
    _, directory, root, _ = written("tp2-bf16")
    shutil.copytree(root / "megatron", tmp_path / "copy")

    def rename(loaded):
        for fused, plain in _PLAIN.items():
            loaded["model"] = {name.replace(plain, fused): value for name, value in loaded["model"].items()}

    for path in (tmp_path / "copy").rglob("*.pt"):
        change(path, rename)
    convert(tmp_path / "copy", "step", tmp_path / "step", model=str(directory / "model"))
    weights = Checkpoint(tmp_path / "step").source(StateKind.MASTER)
    assert same_tensors(weights, Checkpoint(root / "expected").source(StateKind.MASTER))


WITHOUT_STATE = {
    "no optimizer": (lambda loaded: loaded.pop("optimizer"), "no state of an optimizer"),
    "the distributed optimizer": (
        lambda loaded: loaded["optimizer"]["optimizer"].update(state={}),
        "the distributed optimizer's state (distrib_optim.pt), which kit does not read",
    ),
    "optimizers of experts": (
        lambda loaded: loaded.update(optimizer=[loaded["optimizer"]]),
        "several optimizers (of experts), whose state kit does not read",
    ),
    "other groups": (
        lambda loaded: loaded["optimizer"]["optimizer"]["param_groups"][0]["params"].pop(),
        "parameter groups in an order that is not megatron-core's",
    ),
    "a moment less": (
        lambda loaded: loaded["optimizer"]["optimizer"]["state"][0].pop("exp_avg"),
        "is missing or of another shape",
    ),
    "a moment of another shape": (
        lambda loaded: loaded["optimizer"]["optimizer"]["state"][0].update(exp_avg=torch.zeros(1)),
        "is missing or of another shape",
    ),
    "masters of some parameters": (
        lambda loaded: loaded["optimizer"]["fp32_from_fp16_params"][0].pop(),
        "fp32 master weights of some parameters only",
    ),
    "no step": (
        lambda loaded: [
            each.pop("step", None)
            for kind in (loaded["optimizer"]["optimizer"]["state"].values(),)
            for each in (*kind, *loaded["optimizer"]["optimizer"]["param_groups"])
        ],
        "Adam's step is missing",
    ),
}


@pytest.mark.parametrize(("edit", "words"), WITHOUT_STATE.values(), ids=WITHOUT_STATE.keys())
def test_without_a_state_that_kit_reads_it_says_so(written, tmp_path, edit, words):
    _, directory, root, _ = written("tp2-bf16")
    shutil.copytree(root / "megatron", tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*.pt"):
        change(path, edit)
    said = convert(tmp_path / "copy", "step", tmp_path / "out", model=str(directory / "model"))
    assert f"{words}: weights only" in said
    assert Checkpoint(tmp_path / "out").manifest.kinds == (StateKind.MASTER,)


class OfAnotherProgram:
    """A class that no closed list has."""


RANK = "iter_0000002/mp_rank_01_000/model_optim_rng.pt"
DAMAGES = {
    "a rank is missing": (
        lambda root: (root / RANK).unlink(),
        "TP=2 PP=2 and mp_rank_01_000/model_optim_rng.pt is missi",
    ),
    "a rank too many": (
        lambda root: shutil.copytree((root / RANK).parent, (root / RANK).parents[1] / "mp_rank_02_000"),
        "has files of 5 ranks and was written with TP=2 PP=2",
    ),
    "a third number of a rank": (
        lambda root: (root / RANK).parent.rename((root / RANK).parents[1] / "mp_rank_01_000_001"),
        "with expert parallelism, of which kit does not read this format",
    ),
    "mixed iterations": (
        lambda root: change(root / RANK, lambda loaded: loaded.update(iteration=3)),
        "mp_rank_01_000/model_optim_rng.pt is of iteration 3 and its name says 2",
    ),
    "Adam of another step": (
        lambda root: change(root / RANK, lambda loaded: loaded["optimizer"]["param_groups"][0].update(step=1)),
        "whose Adam made 1 and 2 steps",
    ),
    "Adam of a step before the first": (
        lambda root: [
            change(path, lambda loaded: [each.update(step=-1) for each in loaded["optimizer"]["param_groups"]])
            for path in sorted(root.rglob("*.pt"))
        ],
        "whose Adam made -1 steps",
    ),
    "a truncated archive": (
        lambda root: (root / RANK).write_bytes((root / RANK).read_bytes()[:50_000]),
        "model_optim_rng.pt cannot be read",
    ),
    "a flipped byte of a tensor": (lambda root: edit(root / RANK, flipped), r"model_optim_rng.pt is damaged \(.*data/"),
    "an unknown class": (
        lambda root: change(root / RANK, lambda loaded: loaded["args"].__dict__.update(extra=OfAnotherProgram())),
        "names .*OfAnotherProgram, which is not in the closed list",
    ),
    "experts on several ranks": (
        lambda root: [
            change(path, lambda loaded: loaded["args"].__dict__.update(expert_model_parallel_size=2))
            for path in sorted(root.rglob("*.pt"))
        ],
        "with expert parallelism, of which kit does not read this format",
    ),
    "another model": (
        lambda root: [
            change(path, lambda loaded: loaded["args"].__dict__.update(num_attention_heads=8))
            for path in sorted(root.rglob("*.pt"))
        ],
        "of a model with num_attention_heads 8 and model has 4",
    ),
    "queries in the order of old versions": (
        lambda root: [
            change(path, lambda loaded: loaded.update(checkpoint_version=1.0)) for path in sorted(root.rglob("*.pt"))
        ],
        "says checkpoint_version 1.0, in which queries",
    ),
    "no arguments, one stage fewer": (
        lambda root: [
            path.unlink()
            if path.parent.name.endswith("001")
            else change(path, lambda loaded: loaded.update(args=Namespace()))
            for path in sorted(root.rglob("*.pt"))
        ],
        "has 2 layers and model has 4",
    ),
    "not a file of torch.save": (
        lambda root: (root / RANK).write_bytes(pickle.dumps({"model": {}})),
        "model_optim_rng.pt cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_nothing_written(written, tmp_path, damage):
    _, directory, root, _ = written("tp2-pp2")
    shutil.copytree(root / "megatron", tmp_path / "copy")
    harm, message = DAMAGES[damage]
    harm(tmp_path / "copy")
    assert re.search(
        message,
        refusal(CheckpointError, convert, tmp_path / "copy", "step", tmp_path / "out", model=str(directory / "model")),
    )
    assert not (tmp_path / "out").exists()
