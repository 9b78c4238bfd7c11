"""A conversion that is killed goes on with the files that are complete, and writes what an undisturbed one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.engines.base import StateKind, TensorSource
from kit.engines.megatron.checkpoint import torch_dist
from kit.engines.megatron.weights.random import RandomSource
from kit.errors import CheckpointError
from kit.training.checkpoint import convert as conversions
from kit.training.checkpoint import to_huggingface
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.exchange import KINDS
from kit.training.checkpoint.files import partial_name
from kit.training.checkpoint.finished_files import FinishedFiles, resumable_directory
from kit.training.checkpoint.to_huggingface import write_hf
from kit.training.checkpoint.to_universal import write_universal
from tests.support import tiny

FORMATS = ("hf", "exchange", "universal", "dcp", "megatron")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A universal checkpoint: weights and Adam's state."""
    model, directory = tiny.model(num_layers=2), tmp_path_factory.mktemp("source")
    kinds: dict[StateKind, TensorSource] = {kind: RandomSource(model, seed) for seed, kind in enumerate(KINDS)}
    with resumable_directory(directory / "universal") as finished:
        write_universal(model, kinds, Counters(100, 400, 4000, 100, 0), finished, directory)
    return directory / "universal"


def small_files(patch: Callable[..., None] = setattr) -> None:
    """Files of a tensor or a few, so that there is something to go on with."""
    plan_files = conversions.plan_files
    for module in (conversions, to_huggingface):
        patch(module, "plan_files", lambda names, shapes, itemsize, _: plan_files(names, shapes, itemsize, 1 << 14))
    patch(torch_dist, "_FILE_BYTES", 1 << 14)


def killed_after(files: int, source: Path, to: str, out: Path) -> None:
    """Run in a process of its own, which SIGKILL ends while it writes the next file."""
    small_files()
    once = FinishedFiles.once

    def counted(self: FinishedFiles, name: str, write: Callable[[], Any]) -> Any:
        nonlocal files
        if files == 0:
            write()
            os.truncate(self.directory / name, 100)
            os.kill(os.getpid(), signal.SIGKILL)
        files -= 1
        return once(self, name, write)

    FinishedFiles.once = counted
    convert(source, to, out, dtype="float32")


def kill(source: Path, to: str, out: Path, files: int) -> None:
    words = f"from {__name__} import *; killed_after({files}, Path({str(source)!r}), {to!r}, Path({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()


def contents(directory: Path) -> dict[str, bytes]:
    """File → bytes; torch's table of contents has a random id, so that it is compared by what it lets read."""
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if path.name != ".metadata"}


@pytest.fixture
def in_small_files(monkeypatch):
    small_files(monkeypatch.setattr)


@pytest.fixture
def written(monkeypatch) -> list[str]:
    """The files that are written, not kept."""
    names: list[str] = []
    once = FinishedFiles.once

    def counted(self: FinishedFiles, name: str, write: Callable[[], Any]) -> Any:
        return once(self, name, lambda: (names.append(name), write())[1])

    monkeypatch.setattr(FinishedFiles, "once", counted)
    return names


@pytest.mark.nightly
@pytest.mark.parametrize("to", FORMATS)
def test_killed_twice_it_writes_what_an_undisturbed_one_does(to, source, tmp_path, in_small_files, written):
    if to == "universal":  # which the source is
        convert(source, "exchange", tmp_path / "exchange")
        source = tmp_path / "exchange"
    written.clear()
    convert(source, to, tmp_path / "undisturbed", dtype="float32")
    all_files = list(written)
    assert len(all_files) > 5
    written.clear()
    kill(source, to, tmp_path / "out", 3)
    kill(source, to, tmp_path / "out", 5)
    convert(source, to, tmp_path / "out", dtype="float32")
    assert written == all_files[5:]
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    if to in ("dcp", "megatron"):
        there = {name.rpartition("/")[0] for name in contents(tmp_path / "out") if name.endswith(".distcp")}.pop()
        found, expected = (torch_dist.Checkpoint(tmp_path / name / there) for name in ("out", "undisturbed"))
        found.verify()
        assert found._metadata.state_dict_metadata == expected._metadata.state_dict_metadata
        assert found._metadata.storage_data == expected._metadata.storage_data
    assert not partial_name(tmp_path / "out").exists()


CHANGES = {
    "dtype": (lambda *_: None, "bfloat16", 0),
    "source": (lambda source, _: os.utime(source / "master-00001.safetensors", ns=(0, 0)), "float32", 0),
    "a file is shorter": (lambda _, left: os.truncate(sorted(left.glob("*.safetensors"))[1], 100), "float32", 2),
    "the list is damaged": (lambda _, left: (left / ".finished.jsonl").write_bytes(b"\xff[]\n{}"), "float32", 0),
}
"""What changes after a conversion was killed in its fourth file, the dtype of the next one, the files that it keeps."""


@pytest.mark.nightly
@pytest.mark.parametrize(("change", "dtype", "kept"), CHANGES.values(), ids=CHANGES.keys())
def test_what_another_conversion_left_is_written_again(change, dtype, kept, source, tmp_path, in_small_files, written):
    convert(source, "exchange", tmp_path / "exchange")
    kill(tmp_path / "exchange", "hf", tmp_path / "out", 3)
    change(tmp_path / "exchange", partial_name(tmp_path / "out"))
    convert(tmp_path / "exchange", "hf", tmp_path / "undisturbed", dtype=dtype)
    all_files = [name for name in written if name.startswith("model")]
    written.clear()
    convert(tmp_path / "exchange", "hf", tmp_path / "out", dtype=dtype)
    assert len(all_files) - len(written) == kept
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_an_error_leaves_nothing(source, tmp_path):
    class Broken(RandomSource):
        def read(self, name):
            if "layers.1" in name:
                raise OSError("the disk is gone")
            return super().read(name)

    model = tiny.model(num_layers=2)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        write_hf(model, Broken(model, 0), tmp_path / "out", shard_bytes=1 << 14, what="task")
    assert list(tmp_path.iterdir()) == []


def test_two_conversions_do_not_write_the_same_directory(tmp_path):
    with resumable_directory(tmp_path / "out", "task"):
        second = resumable_directory(tmp_path / "out", "task")
        with pytest.raises(CheckpointError, match="another process writes"):
            second.__enter__()
        assert partial_name(tmp_path / "out").exists()
