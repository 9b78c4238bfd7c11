"""The files of a streamed data set, by ``datasets``: each is a shard, whose documents are read from any number on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kit.errors import DataError
from kit.specs.run import StreamSpec
from kit.specs.text import nearest
from kit.training.data.sources import as_data_error

_BATCH_DOCUMENTS = 1000
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""datasets 5.2.0 gives s3fs options of its HTTP client for these (filesystems/compression.py), which raises."""


@dataclass(frozen=True)
class StreamSource:
    """A split that ``open_source`` has opened."""

    names: tuple[str, ...]
    """Path or address of each file."""
    digests: tuple[str, ...]
    """Hash of each file's name, without its directory, and version: time and size, ETag, or revision."""
    text_key: str
    _dataset: Any

    def documents(self, file: int, start: int, share: int = 1, offset: int = 0) -> Iterator[tuple[int, str]]:
        """(number, text) of the documents of a file from number ``start`` on whose number is ``offset`` modulo
        ``share``. Raises DataError."""
        name = self.names[file]
        with as_data_error(name):
            shard = self._dataset.shard(len(self.names), file).skip(start).with_format("arrow")
            for table in shard.iter(_BATCH_DOCUMENTS):
                _check_column(name, self.text_key, table.column_names)
                first = (offset - start) % share
                texts = table.column(self.text_key).to_pylist()
                for number, text in zip(
                    range(start + first, start + len(texts), share), texts[first::share], strict=True
                ):
                    if not isinstance(text, str):
                        raise DataError(f"{name}: row {number} has no text in column {self.text_key!r}; name another")
                    yield number, text
                start += len(texts)


def open_source(spec: StreamSpec) -> StreamSource:
    """Open the split that a recipe names; reads the first rows of JSON. Raises DataError if it is not there, or has no
    such column."""
    with as_data_error(f"run.data.stream.path={spec.path}"):
        import datasets  # type: ignore[import-untyped]

        files = {spec.split: list(spec.data_files)} if spec.data_files else None
        builder = datasets.load_dataset_builder(spec.path, spec.name, data_files=files, revision=spec.revision)
        found = builder.config.data_files or {}
        if not found.get(spec.split):
            splits = [str(split) for split in found if found[split]]
            there = f"has the splits {', '.join(splits)}" if splits else "finds no files"
            raise DataError(f"run.data.stream.split={spec.split}: {spec.path} {there}; check split and data_files")
        for name in found[spec.split]:
            if name.startswith("s3://") and name.endswith(_COMPRESSED):
                raise DataError(f"{name}: datasets reads no compressed objects of S3; store parquet or plain jsonl")
        dataset = builder.as_streaming_dataset(spec.split)
        if dataset.column_names is not None:
            _check_column(spec.path, spec.text_key, dataset.column_names)
        if hasattr(builder.config, "columns"):  # Parquet reads the bytes of these alone
            builder.config.columns = [spec.text_key]
            dataset = builder.as_streaming_dataset(spec.split)
    names, versions = tuple(found[spec.split]), found[spec.split].origin_metadata
    if dataset.num_shards != len(names):
        raise DataError(
            f"run.data.stream.path={spec.path}: its {len(names)} files are {dataset.num_shards} shards for datasets; "
            f"use json, parquet or text"
        )
    digests = (_digest(name, *version) for name, version in zip(names, versions, strict=True))
    return StreamSource(names, tuple(digests), spec.text_key, dataset)


def _digest(name: str, *version: str) -> str:
    size = [str(os.path.getsize(name))] if os.path.isfile(name) else []
    return hashlib.sha256("\n".join([os.path.basename(name), *version, *size]).encode()).hexdigest()[:16]


def _check_column(name: str, text_key: str, columns: list[str]) -> None:
    if text_key not in columns:
        raise DataError(f"{name} has no column {text_key!r}; run.data.stream.text_key: {nearest(text_key, columns)}")
