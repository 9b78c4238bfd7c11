"""Files written by several at once: every part where it belongs, and what was lost is noticed."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from kit.engines.io import parallel_safetensors
from kit.engines.io.parallel_safetensors import BlockWriter, ParallelFile, size_hash_and_sum
from kit.engines.protocol import StateKind, TensorShard
from kit.errors import CheckpointError
from kit.training.checkpoint import random_state, store
from kit.training.checkpoint.files import record_of
from kit.training.checkpoint.store import State, write_blocks
from tests.support.calls import before
from tests.support.refusals import refusal
from tests.training.disk import full_disk

TENSORS = {"matrix": torch.rand(17, 9), "vector": torch.rand(11), "transposed": torch.rand(6, 8)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


KINDS = (StateKind.MASTER, StateKind.EXP_AVG)


def halves():
    """Each tensor of the only rank in two blocks, of rows or of columns."""
    for kind in KINDS:
        for name, tensor in TENSORS.items():
            matrix = tensor.view(tensor.shape[0], -1)
            dim = int(name == "matrix")
            for number, start in enumerate((0, 4)):
                values = matrix.narrow(dim, start, (4, matrix.shape[dim] - 4)[number])
                if name == "transposed":
                    values = values.t().contiguous().t()
                row, column = (0, start) if dim else (start, 0)
                yield TensorShard(kind, name, SHAPES[name], row, column, values)


def write(directory, blocks=halves):
    for folder in ("model", "exp_avg", "private", "random"):
        (directory / folder).mkdir(exist_ok=True)
    state = State(KINDS, blocks, {}, {}, None)
    return write_blocks(state, directory, dict.fromkeys(TENSORS, "a.safetensors"), SHAPES, True, "writing")


@pytest.mark.parametrize("block_bytes", [40, 8 * 2**20])
def test_parts_become_the_tensors(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(parallel_safetensors, "BLOCK_BYTES", block_bytes)
    records = write(tmp_path)
    assert sorted(records) == ["exp_avg/a.safetensors", "model/a.safetensors"]
    for name, record in records.items():
        assert record == record_of(tmp_path / name)
        found = load_file(tmp_path / name)
        assert all(torch.equal(found[each], TENSORS[each]) for each in TENSORS)


def test_writes_that_stop_half_way_go_on_where_they_stopped(tmp_path, monkeypatch):
    """As pwrite may: a network file system, a signal."""
    real = parallel_safetensors.os.pwrite
    monkeypatch.setattr(
        parallel_safetensors.os, "pwrite", lambda fd, data, at: real(fd, memoryview(data).cast("B")[:20], at)
    )
    write(tmp_path)
    assert all(torch.equal(load_file(tmp_path / "model/a.safetensors")[each], TENSORS[each]) for each in TENSORS)


def test_what_was_written_is_on_the_disk(tmp_path, monkeypatch):
    """Tensors, and what a rank writes alone: another host cannot flush it."""
    synced, alone = [], []
    before(monkeypatch, os, "fdatasync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    assert {os.path.basename(name) for name in write(tmp_path)} == set(map(os.path.basename, synced))
    monkeypatch.setattr(store, "fsync", alone.append)
    alone_has = State(KINDS, halves, {}, {"x": torch.zeros(1)}, random_state.capture())
    own = ["private/rank-00000.safetensors", "random/rank-00000.json"]
    assert [*store._write_own(alone_has, tmp_path)] == [str(path.relative_to(tmp_path)) for path in alone] == own


def wrong(change):
    """``halves`` with the third block changed."""
    blocks = list(halves())
    return lambda: iter([*blocks[:2], *change(blocks[2]), *blocks[3:]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda block: [], r"the ranks wrote \d+ of its \d+ values"),
        (lambda block: [block, block], r"the ranks wrote \d+ of its \d+ values"),
        (lambda block: [replace(block, row=block.row + 1)], "does not hold what was written to it"),
        (lambda block: [replace(block, row=block.row + 11)], "is outside of vector"),
        (lambda block: [replace(block, row=-1)], "is outside of vector"),
    ],
    ids=["a gap", "an overlap", "a row too far", "beyond the end", "before the start"],
)
def test_every_value_is_written_exactly_once(tmp_path, change, said):
    assert re.search(said, refusal(CheckpointError, lambda: write(tmp_path, wrong(change))))


def test_writes_that_a_file_system_loses_are_noticed(tmp_path, monkeypatch):
    real = parallel_safetensors.os.pwrite
    monkeypatch.setattr(
        parallel_safetensors.os, "pwrite", lambda fd, data, at: real(fd, data, at) if at < 400 else len(data)
    )
    assert "does not hold what was written to it" in refusal(CheckpointError, write, tmp_path)


def test_a_file_that_cannot_be_opened_leaves_nothing_open_and_closes_nothing_twice(tmp_path):
    there, gone = (ParallelFile(tmp_path / f"{name}.safetensors", {"vector": (11,)}) for name in ("there", "gone"))
    there.create()
    with BlockWriter() as writer:  # at its end it would be told of a descriptor that is closed already
        writer.write(there, "vector", 0, 0, TENSORS["vector"].view(-1, 1))
        refusal(FileNotFoundError, writer.write, gone, "vector", 0, 0, TENSORS["vector"].view(-1, 1))


def test_a_full_disk_is_an_error(tmp_path):
    with full_disk(300), pytest.raises(CheckpointError, match="writing failed"):
        write(tmp_path)
    file = ParallelFile(tmp_path / "small.safetensors", {"vector": (11,)})
    file.create()
    with full_disk(20), pytest.raises(OSError, match="large"), BlockWriter() as writer:
        writer.write(file, "vector", 0, 0, TENSORS["vector"].view(-1, 1))
    assert size_hash_and_sum(file.path)[0] == record_of(file.path).bytes
