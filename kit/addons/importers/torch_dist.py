"""Reads and writes megatron-core's ``torch_dist`` format one block at a time, by torch.distributed.checkpoint.

A checkpoint is a directory with the files of torch.distributed.checkpoint, ``common.pt`` (all values that are not
sharded) and ``metadata.json`` (the format): megatron-core, dist_checkpointing/core.py and strategies/torch.py.
megatron-core's own writer spawns processes and copies all tensors; its reader needs the whole model at once. This
module does neither.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kit.addons.importers.opaque import plain_values
from kit.addons.importers.safe_unpickle import MetadataUnpickler
from kit.addons.importers.stored import StoredTensor
from kit.errors import CheckpointError
from kit.specs.job import OptimizerName
from kit.specs.text import refuse
from kit.units import GIB

COMMON = "common.pt"
_FILE_BYTES = GIB


Block = tuple[WriteItem, Callable[[], torch.Tensor]]
"""One block of a tensor to write, and a function that returns it, in any dtype and on any device; it is called once,
when the block is written."""


def block_of(
    key: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    read: Callable[[], torch.Tensor],
) -> Block:
    """The block of ``sizes`` at ``offsets`` of the tensor ``key``, whose whole has ``shape``."""
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size(shape))
    return WriteItem(MetadataIndex(key, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data), read


def write_blocks(directory: Path, *, blocks: Sequence[Block], common: Mapping[str, Any] | None) -> None:
    """Write a checkpoint into an empty directory, in this process alone. ``common``: None for torch's format alone,
    without the files that Megatron adds. Raises CheckpointError or OSError.
    """
    try:
        state_dict_saver.save({}, storage_writer=_Writer(directory), planner=_SavePlanner(blocks), no_dist=True)
    except CheckpointException as error:  # a BaseException with the errors of all ranks
        if any(isinstance(failure[0], KeyboardInterrupt) for failure in error.failures.values()):
            raise KeyboardInterrupt from error
        causes = [f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()]
        raise CheckpointError(f"{directory} could not be written: {'; '.join(causes)}") from error
    if common is not None:
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        torch.save(dict(common), directory / COMMON)
        save_config(CheckpointingConfig("torch_dist"), str(directory))


class Checkpoint:
    """A checkpoint on disk. The constructor reads the table of contents with an unpickler that allows its classes only.

    Raises CheckpointError if the table is missing or damaged, or contains another class.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = filesystem.FileSystemReader(directory)
        try:
            self._metadata: Metadata = MetadataUnpickler(io.BytesIO((directory / ".metadata").read_bytes())).load()
            self.tensors: dict[str, TensorStorageMetadata] = {
                key: found
                for key, found in self._metadata.state_dict_metadata.items()
                if isinstance(found, TensorStorageMetadata)
            }
        except Exception as error:  # a damaged pickle may raise anything, MemoryError too
            said = str(error) or type(error).__name__
            raise CheckpointError(
                f"{directory} is not a torch_dist checkpoint of Megatron ({said}); give the directory with .metadata "
                f"and *.distcp in it"
            ) from error
        stored = self._metadata.storage_data or {}
        damaged = {
            f"{directory / '.metadata'} does not say in which file {key} is: it is damaged; copy it again": (
                any(MetadataIndex(key, chunk.offsets) not in stored for chunk in found.chunks)
            )
            for key, found in self.tensors.items()
        }
        refuse(damaged, CheckpointError)

    def require_files(self) -> None:
        """Raises CheckpointError that names the first file that is missing."""
        paths = {
            self.directory / Path(info.relative_path).name for info in (self._metadata.storage_data or {}).values()
        }
        missing = {
            f"{path} is missing; copy the checkpoint again, from every rank": not path.is_file()
            for path in sorted(paths)
        }
        refuse(missing, CheckpointError)

    def verify(self) -> None:
        """Compare every stored part with its CRC-32, which torch's reader does not do. One part is in memory at a time.

        Raises CheckpointError that names the missing or damaged file."""
        self.require_files()
        for info in (self._metadata.storage_data or {}).values():
            verify_archive(self.directory / Path(info.relative_path).name, info.offset, info.length)

    def common(self) -> dict[str, Any]:
        """Plain values of ``common.pt``; empty without that file. Raises CheckpointError."""
        path = self.directory / COMMON
        found = plain_values(path) if path.exists() else {}
        return found if isinstance(found, dict) else {}

    def optimizer_steps(self) -> int | None:
        """The optimizer's step count; None if the checkpoint does not say it, for example without an optimizer."""
        steps = (group.get("step") for group in _param_groups(self.common().get("optimizer")))
        return max((step for step in steps if isinstance(step, int)), default=None)

    def optimizer(self) -> OptimizerName:
        """The optimizer that wrote the state, by the keys of its parameter groups. Muon has groups of Adam's beside its
        own."""
        keys = {key for group in _param_groups(self.common().get("optimizer")) for key in group}
        return "adamw" if "momentum" not in keys else "muon" if "betas" in keys else "sgd"

    def block(
        self,
        key: str,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        padded: int | None = None,
    ) -> torch.Tensor:
        """The block of ``sizes`` at ``offsets`` of the tensor ``key``, in the dtype on disk. ``shape``: of the whole
        tensor, which the stored one may exceed in the dimension ``padded``, because a layout may pad the vocabulary.

        Raises CheckpointError for a tensor that is missing, of another shape, incomplete or damaged."""
        if (found := self.tensors.get(key)) is None:
            raise CheckpointError(
                f"tensor {key} is not in the checkpoint; it has {len(self.tensors)} other tensors: "
                f"use a checkpoint of the same model"
            )
        more = [have - want for have, want in zip(found.size, shape, strict=False)]
        if len(found.size) != len(shape) or any(n < 0 or (n and dim != padded) for dim, n in enumerate(more)):
            raise CheckpointError(
                f"tensor {key} has shape {list(found.size)} in the checkpoint and {list(shape)} in the "
                f"model; use a checkpoint of the same model"
            )
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        items = [
            dataclasses.replace(item, dest_index=MetadataIndex(key))  # the block, of no offset
            for item in create_read_items_for_chunk_list(key, found, [chunk])
        ]
        if sum(item.lengths.numel() for item in items) != chunk.sizes.numel():
            raise CheckpointError(f"tensor {key} is not complete in the checkpoint; write or copy it again")
        block = torch.empty(sizes, dtype=found.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({key: block}, self._metadata)
        try:
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(LoadPlan(items), planner).wait()
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(
                f"{self.directory} cannot be read ({' '.join(str(error).split())[:300]}); copy it again, complete"
            ) from error
        return block

    def stored(self) -> dict[str, StoredTensor]:
        """Every tensor, not read yet. Reading raises CheckpointError."""
        return {
            key: StoredTensor(
                tuple(found.size),
                found.properties.dtype,
                partial(self.block, key, found.size, (0,) * len(found.size), found.size),
            )
            for key, found in self.tensors.items()
        }


def verify_archive(path: Path, offset: int = 0, length: int = -1) -> None:
    """Compare a part of a file, which ``torch.save`` wrote, with the CRC-32 of its parts, which torch does not compare.
    Raises CheckpointError that names the damaged file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            part = file if length < 0 else io.BytesIO(file.read(length))
            damaged = zipfile.ZipFile(part).testzip() if zipfile.is_zipfile(part) else None
    except Exception as error:  # a damaged archive may raise anything, is_zipfile too
        damaged = str(error)[:200]
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged ({damaged}); copy the checkpoint again")


def _param_groups(node: Any) -> Iterator[dict[str, Any]]:
    """The parameter groups of one or several optimizers."""
    if isinstance(node, dict) and isinstance(node.get("param_groups"), list):
        yield from (group for group in node["param_groups"] if isinstance(group, dict))
    elif isinstance(node, dict):
        for inner in node.values():
            yield from _param_groups(inner)


class _Writer(filesystem.FileSystemWriter):
    """Writes files of about a gigabyte. torch keeps every tensor of a file in memory until the file is complete
    (filesystem.py, _write_files_from_queue), and puts all tensors of a rank into one file."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, thread_count=1)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """The first file has torch's name for it, ``__0_0.distcp``; the next ones are ``__0_1_0.distcp``, …"""
        written: Future[list[Any]] = Future()
        results: list[WriteResult] = []
        for number, items in enumerate(_of_about(_FILE_BYTES, plan.items)):
            prefix = plan.storage_data.prefix + (f"{number}_" if number else "")
            storage = dataclasses.replace(plan.storage_data, prefix=prefix)
            results += super().write_data(dataclasses.replace(plan, items=items, storage_data=storage), planner).wait()
        written.set_result(results)
        return written


def _of_about(most_bytes: int, items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The items in order, in lists of about so many bytes, or of one larger item."""
    ends = itertools.accumulate(map(_bytes, items))
    lists = itertools.groupby(zip(items, ends, strict=True), key=lambda each: each[1] // most_bytes)
    return [[item for item, _ in same] for _, same in lists]


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


class _SavePlanner(DefaultSavePlanner):
    """Saves given blocks instead of a state dict."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items = [item for item, _ in blocks]
        self._reads = {item.index: read for item, read in blocks}
        assert len(self._reads) == len(blocks)

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        data = write_item.tensor_data
        return self._reads[write_item.index]().to(data.properties.dtype).reshape(data.chunk.sizes)
