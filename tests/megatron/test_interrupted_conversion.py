"""A conversion that is killed leaves no directory of its name, and the next one starts again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kit.addons.importers import torch_dist
from kit.addons.importers.to_universal import write_universal
from kit.engines.megatron.weights.random import RandomSource
from kit.engines.protocol import StateKind, TensorSource
from kit.errors import CheckpointError
from kit.files import partial_name
from kit.training.checkpoint import store, to_huggingface
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.files import new_directory
from kit.training.checkpoint.formats import Opened
from kit.training.checkpoint.manifest import FOLDERS
from kit.training.checkpoint.to_huggingface import write_hf
from kit.training.counters import Counters
from tests.support import tiny
from tests.support.calls import before, killing
from tests.support.files import files_below
from tests.support.refusals import refusal

FORMATS = ("hf", "step", "universal", "dcp", "megatron")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A universal checkpoint: weights and Adam's state."""
    model, directory = tiny.model(num_layers=2), tmp_path_factory.mktemp("source")
    kinds: dict[StateKind, TensorSource] = {kind: RandomSource(model, seed) for seed, kind in enumerate(FOLDERS)}
    with new_directory(directory / "universal") as into:
        write_universal(Opened(model, Counters(100, 400, 4000, 100, 0), kinds), into, torch.float32, directory)
    return directory / "universal"


def small_files(patch: Callable[..., None] = setattr) -> None:
    """Files of a tensor or a few, so that there is something to go on with."""
    split = store.split_into_files
    for module in (store, to_huggingface):
        patch(module, "split_into_files", lambda tensors, _: split(tensors, 1 << 14))
    patch(torch_dist, "_FILE_BYTES", 1 << 14)


def killed_in(file: int, source: Path, to: str, out: Path) -> None:
    """Run in a process of its own, which SIGKILL ends before it writes the file of this number."""
    small_files()
    kill, written = killing(file), [(store, "write_tensors"), (to_huggingface, "write_tensors"), (torch, "save")]
    for owner, name in [*written, (torch_dist.filesystem.FileSystemWriter, "write_data")]:  # called for each file
        before(pytest.MonkeyPatch(), owner, name, kill)
    convert(source, to, out, dtype="float32")


def kill(source: Path, to: str, out: Path, file: int) -> None:
    words = f"from {__name__} import *; killed_in({file}, Path({str(source)!r}), {to!r}, Path({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert any(partial_name(out).rglob("*"))


def contents(directory: Path) -> dict[str, bytes]:
    """File → bytes; torch's table of contents has a random id, so that it is compared by what it lets read."""
    return {name: content for name, content in files_below(directory).items() if not name.endswith(".metadata")}


@pytest.mark.nightly
@pytest.mark.parametrize("to", FORMATS)
def test_killed_it_starts_again_and_writes_what_an_undisturbed_one_does(to, source, tmp_path, monkeypatch):
    small_files(monkeypatch.setattr)
    if to == "universal":  # which the source is
        convert(source, "step", tmp_path / "step")
        source = tmp_path / "step"
    convert(source, to, tmp_path / "undisturbed", dtype="float32")
    kill(source, to, tmp_path / "out", 4)
    convert(source, to, tmp_path / "out", dtype="float32")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    if to in ("dcp", "megatron"):
        there = {name.rpartition("/")[0] for name in contents(tmp_path / "out") if name.endswith(".distcp")}.pop()
        found, expected = (torch_dist.Checkpoint(tmp_path / name / there) for name in ("out", "undisturbed"))
        found.verify()
        assert found._metadata.state_dict_metadata == expected._metadata.state_dict_metadata
        assert found._metadata.storage_data == expected._metadata.storage_data
    assert not list(tmp_path.glob(".out*"))


def test_an_error_leaves_nothing(source, tmp_path):
    class Broken(RandomSource):
        def read(self, name):
            if "layers.1" in name:
                raise OSError("the disk is gone")
            return super().read(name)

    model = tiny.model(num_layers=2)
    assert "the disk is gone" in refusal(
        CheckpointError, write_hf, model, Broken(model, 0), tmp_path / "out", shard_bytes=1 << 14
    )
    assert list(tmp_path.iterdir()) == []


def test_two_conversions_do_not_write_the_same_directory(tmp_path):
    with new_directory(tmp_path / "out"):
        assert "another process writes" in refusal(CheckpointError, new_directory(tmp_path / "out").__enter__)
        assert partial_name(tmp_path / "out").exists()
