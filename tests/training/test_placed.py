"""Files written by several at once: every part where it belongs, and what was lost is noticed."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

from kit.engines.io import parallel_safetensors
from kit.engines.io.parallel_safetensors import BlockWriter, ParallelFile, size_hash_and_sum
from kit.engines.protocol import StateBlock, StateKind
from kit.errors import CheckpointError
from kit.training.checkpoint.files import record_of
from kit.training.checkpoint.transfer import write_blocks
from tests.support.calls import before
from tests.training.disk import full_disk

TENSORS = {"matrix": torch.rand(17, 9), "vector": torch.rand(11), "transposed": torch.rand(6, 8)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


class Halves:
    """An engine whose only rank gives each tensor in two blocks, of rows or of columns."""

    is_main = True

    def export_blocks(self, kinds):
        for kind in kinds:
            for name, tensor in TENSORS.items():
                matrix = tensor.view(tensor.shape[0], -1)
                dim = int(name == "matrix")
                for number, start in enumerate((0, 4)):
                    values = matrix.narrow(dim, start, (4, matrix.shape[dim] - 4)[number])
                    if name == "transposed":
                        values = values.t().contiguous().t()
                    row, column = (0, start) if dim else (start, 0)
                    yield StateBlock(kind, name, SHAPES[name], row, column, values)


def write(engine, directory):
    plan = {kind: {f"{kind.value}.safetensors": list(TENSORS)} for kind in (StateKind.MASTER, StateKind.EXP_AVG)}
    return write_blocks(engine, directory, plan, SHAPES, "writing")


@pytest.mark.parametrize("block_bytes", [40, 8 * 2**20])
def test_parts_become_the_tensors(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(parallel_safetensors, "BLOCK_BYTES", block_bytes)
    records = write(Halves(), tmp_path)
    assert sorted(records) == ["exp_avg.safetensors", "master.safetensors"]
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
    write(Halves(), tmp_path)
    assert all(torch.equal(load_file(tmp_path / "master.safetensors")[each], TENSORS[each]) for each in TENSORS)


def test_what_was_written_is_on_the_disk(tmp_path, monkeypatch):
    synced = []
    before(monkeypatch, os, "fdatasync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    assert {str(tmp_path / name) for name in write(Halves(), tmp_path)} == set(synced)


def test_writes_that_a_file_system_loses_are_noticed(tmp_path, monkeypatch):
    real = parallel_safetensors.os.pwrite
    monkeypatch.setattr(
        parallel_safetensors.os, "pwrite", lambda fd, data, at: real(fd, data, at) if at < 400 else len(data)
    )
    with pytest.raises(CheckpointError, match=r"does not hold what was written to it"):
        write(Halves(), tmp_path)


def test_a_file_that_cannot_be_opened_leaves_nothing_open_and_closes_nothing_twice(tmp_path):
    there, gone = (ParallelFile(tmp_path / f"{name}.safetensors", {"vector": (11,)}) for name in ("there", "gone"))
    there.create()
    writer = BlockWriter()
    writer.write(there, "vector", 0, 0, TENSORS["vector"].view(-1, 1))
    with pytest.raises(FileNotFoundError):
        writer.write(gone, "vector", 0, 0, TENSORS["vector"].view(-1, 1))
    writer.finish()  # would be told of a descriptor that is closed already


def test_a_full_disk_is_an_error(tmp_path):
    with full_disk(300), pytest.raises(CheckpointError, match="writing failed"):
        write(Halves(), tmp_path)
    file = ParallelFile(tmp_path / "small.safetensors", {"vector": (11,)})
    file.create()
    writer = BlockWriter()
    with full_disk(20), pytest.raises(OSError, match="large"):
        writer.write(file, "vector", 0, 0, TENSORS["vector"].view(-1, 1))
    writer.abandon()
    assert size_hash_and_sum(file.path)[0] == record_of(file.path).bytes
