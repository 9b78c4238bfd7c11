"""All ranks write their blocks of one engine's state into the same files at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from kit.engines.base import Engine, StateKind
from kit.engines.io.parallel_safetensors import BlockWriter, ParallelFile, size_hash_and_sum
from kit.errors import CheckpointError
from kit.training.checkpoint.collective import run_collectively, split_over_ranks
from kit.training.checkpoint.files import FileRecord

Plan = Mapping[StateKind, Mapping[str, Sequence[str]]]
"""Kind → file → names of its tensors."""


def write_blocks(
    engine: Engine, directory: Path, plan: Plan, shapes: Mapping[str, tuple[int, ...]], doing: str
) -> dict[str, FileRecord]:
    """Collective. Write all files of ``plan`` into ``directory``. Raises CheckpointError on every rank.

    Files are hashed as they can be read afterwards, split over the ranks; a sum over what was written tells whether
    that is what was meant: ranks of other hosts write to the same files, which not every network file system gets
    right.
    """
    files = {
        kind: [
            ParallelFile(directory / file, {name: shapes[name] for name in names}) for file, names in of_kind.items()
        ]
        for kind, of_kind in plan.items()
    }
    everything = [file for of_kind in files.values() for file in of_kind]
    (heads,) = run_collectively(engine.is_main, lambda: {file.path: file.create() for file in everything}, doing)
    sums = run_collectively(True, lambda: _write(engine, files), doing)
    expected = {path: (head + sum(each.get(path, 0) for each in sums)) % 2**32 for path, head in heads.items()}
    mine = split_over_ranks([*expected])
    shares = run_collectively(True, lambda: {path.name: _record(path, expected[path]) for path in mine}, doing)
    return {name: record for each in shares for name, record in each.items()}


def _write(engine: Engine, files: Mapping[StateKind, Sequence[ParallelFile]]) -> dict[Path, int]:
    where = {(kind, name): file for kind, of_kind in files.items() for file in of_kind for name in file.shapes}
    writer, blocks = BlockWriter(), engine.export_blocks(list(files))
    try:
        for block in blocks:
            writer.write(where[block.kind, block.name], block.name, block.row, block.column, block.values)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    finally:
        deque(blocks, maxlen=0)  # after a failure too: the other ranks wait in the export's collectives
    return writer.sums


def _record(path: Path, expected_sum: int) -> FileRecord:
    size, digest, total = size_hash_and_sum(path)
    if total != expected_sum:
        raise CheckpointError(
            f"{path} does not hold what was written to it: this file system loses writes where several hosts write to "
            f"one file; write checkpoints to a local disk or a parallel file system"
        )
    return FileRecord(size, digest)
