"""What a conversion reads: text, JSON Lines, Parquet and saved data sets, cut into blocks for several processes.

A block of JSON Lines is a range of bytes; the lines that begin in it belong to it. Of the other kinds a block is a
range of rows, or a whole file of text. A block is read without the blocks before it, so a conversion goes on at any.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from kit.errors import DataError, KitError
from kit.object_storage import RemoteFile, is_address, open_filesystem
from kit.specs.text import nearest
from kit.training.data.tokenizers import one_line

BLOCK_BYTES = 4 << 20
"""Bytes of JSON Lines in a block: a second or two of one core."""
_BLOCK_ROWS = {".parquet": 10_000, "": 1000}
"""Rows in a block, by suffix; "" is a saved data set. Parquet's is larger because the rows of a row group that precede
the block are decoded too."""
_TEXT_SUFFIXES = (".txt", ".text", ".md")
_JSON_SUFFIXES = (".jsonl", ".ndjson")
_BATCH_ROWS = 1000
_REST_BYTES = 1 << 16
"""Bytes read at a time to complete the last line of a block."""


@dataclass(frozen=True)
class Source:
    """A file, an object at an address such as ``s3://bucket/part-1.jsonl``, or the directory of a saved data set."""

    name: str
    num_bytes: int
    version: str
    """Differs after a change of the content: the time of the last change, or an object's ETag."""

    @property
    def suffix(self) -> str:
        """Suffix of the file; "" for a data set."""
        return "" if Path(self.name).is_dir() else Path(self.name).suffix


@dataclass(frozen=True)
class Block:
    """A part of a source. ``start`` and ``stop`` are bytes of JSON Lines, rows of a table; a text file is one row."""

    source: str
    start: int
    stop: int


def find_sources(name: str) -> list[Source]:
    """The source of a path; at an address, whose last part may be a pattern, one or several. Raises DataError if there
    is none, or its kind is unknown."""
    if is_address(name):
        return _remote(name)
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    elif path.is_file():
        files = [path]
        _check_suffix(name)
    else:
        raise DataError(f"{name} does not exist; give text, .jsonl or .parquet files, or a saved data set")
    stats = [file.stat() for file in files]
    changed = max((stat.st_mtime_ns for stat in stats), default=0)
    return [Source(name, sum(stat.st_size for stat in stats), f"changed at {changed} ns")]


def _remote(address: str) -> list[Source]:
    filesystem, path = open_filesystem("source", address)
    with _described(address):
        pattern = any(letter in path for letter in "*?[")
        infos = filesystem.glob(path, detail=True).values() if pattern else [filesystem.info(path)]
    found = []
    for info in sorted(infos, key=lambda info: str(info["name"])):
        if info["type"] == "file":
            name = filesystem.unstrip_protocol(info["name"])
            _check_suffix(name)
            there = RemoteFile.of(info)
            found.append(Source(name, there.num_bytes, there.version))
    if not found:
        raise DataError(f"{address} names no file; give .jsonl, .parquet or text files, or a pattern that matches some")
    return found


def _check_suffix(name: str) -> None:
    if (suffix := Path(name).suffix) not in (*_TEXT_SUFFIXES, *_JSON_SUFFIXES, ".parquet"):
        raise DataError(
            f"{name} has the unknown suffix {suffix!r}; use {', '.join(_TEXT_SUFFIXES)}, .jsonl or .parquet"
        )


@contextmanager
def _described(name: str) -> Iterator[None]:
    with as_data_error(name):
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(f"{name} does not exist; check the name") from error


@contextmanager
def as_data_error(name: str) -> Iterator[None]:
    """What any file system or network raises becomes a DataError."""
    try:
        yield
    except KitError:
        raise
    except Exception as error:  # every protocol has its own
        raise DataError(
            f"{name} cannot be read ({one_line(error) or type(error).__name__}); check the name, the permissions and, "
            "of an address, the credentials in the environment"
        ) from error


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    """A file or an object, for reading. Raises DataError."""
    with _described(name):
        if is_address(name):
            filesystem, path = open_filesystem("source", name)
            # A block is read at once; what a cache would read ahead is another process's.
            with filesystem.open(path, "rb", cache_type="none") as file:
                yield file
        else:
            with open(name, "rb") as file:
                yield file


def blocks(source: Source, start: int = 0) -> Iterator[tuple[Block, int]]:
    """(block, number of bytes that it is of the source) from ``start`` on, in the units of ``Block``."""
    if source.suffix in _JSON_SUFFIXES:
        bounds = [*range(start, source.num_bytes, BLOCK_BYTES), source.num_bytes]
    elif source.suffix in _TEXT_SUFFIXES:
        bounds = [start, 1]
    else:
        groups = _row_groups(source.name) if source.suffix == ".parquet" else [len(_saved_dataset(source.name))]
        rows, ends = _BLOCK_ROWS[source.suffix], [0]
        for group in groups:
            ends += [*range(ends[-1] + rows, ends[-1] + group, rows), ends[-1] + group]
        bounds = [start, *(end for end in ends if end > start)]
    for first, last in pairwise(bounds):
        if last > first:
            num_bytes = source.num_bytes * last // bounds[-1] - source.num_bytes * first // bounds[-1]
            yield Block(source.name, first, last), num_bytes


def texts(block: Block, text_key: str) -> Iterator[str]:
    """The documents of a block. Raises DataError."""
    suffix = Source(block.source, 0, "").suffix
    if not suffix:
        return _of_dataset(block, text_key)
    if suffix == ".parquet":
        return _of_parquet(block, text_key)
    if suffix in _TEXT_SUFFIXES:
        return iter([_text_file(block.source)])
    return (_text_of(row, text_key, where) for where, row in json_rows(block))


def json_rows(block: Block) -> Iterator[tuple[object, Any]]:
    """(place for messages, row) of a block of JSON Lines; skips blank lines. Raises DataError."""
    if Path(block.source).suffix not in _JSON_SUFFIXES:
        raise DataError(f"{block.source}: rows for fine-tuning are read from .jsonl files; save the data set as one")
    for offset, line in _lines(block):
        if line.strip():
            where = _Line(block.source, offset)
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError as error:
                raise DataError(f"{where} is not JSON Lines ({error}); one JSON object a line is needed") from error
            yield where, row


@dataclass(frozen=True)
class _Line:
    """A place in a file of lines, whose number is counted only for a message."""

    name: str
    offset: int

    def __str__(self) -> str:
        number, position = 1, 0
        while position < self.offset:
            part = _range(self.name, position, min(position + BLOCK_BYTES, self.offset))
            number, position = number + part.count(b"\n"), position + len(part)
        return f"{self.name}:{number}"


def _lines(block: Block) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that begin in the block."""
    position = max(block.start - 1, 0)
    data = _range(block.source, position, block.stop)
    if block.start:  # the byte before the block says whether a line begins with it
        first = data.find(b"\n") + 1
        if not first:
            return
        position, data = position + first, data[first:]
    if data and not data.endswith(b"\n"):
        data += _to_end_of_line(block.source, block.stop)
    for line in data.split(b"\n"):
        yield position, line
        position += len(line) + 1


def _to_end_of_line(name: str, start: int) -> bytes:
    rest = b""
    while part := _range(name, start + len(rest), start + len(rest) + _REST_BYTES):
        end = part.find(b"\n") + 1
        rest += part[:end] if end else part
        if end:
            break
    return rest


def _range(name: str, start: int, stop: int) -> bytes:
    with _opened(name) as file:
        file.seek(start)
        return file.read(stop - start)


def _text_file(name: str) -> str:
    with _opened(name) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
        try:
            return text.read()
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not readable as UTF-8 text ({error}); convert it first") from error


def _row_groups(name: str) -> list[int]:
    """Number of rows of each row group."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    with _opened(name) as file:
        try:
            metadata = pyarrow.parquet.read_metadata(file)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{name} is not readable as Parquet ({one_line(error)}); copy it again") from error
    return [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]


def _of_parquet(block: Block, text_key: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    with _opened(block.source) as opened:
        try:
            file = pyarrow.parquet.ParquetFile(opened)
            if text_key not in (names := file.schema_arrow.names):
                raise DataError(f"{block.source} has no column {text_key!r}; {nearest(text_key, names)}")
            first = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if first <= block.start < first + rows:
                    yield from _of_row_group(file, group, block, first, text_key)
                first += rows
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{block.source} is not readable as Parquet ({one_line(error)}); copy it again") from error


def _of_row_group(file: Any, group: int, block: Block, first: int, text_key: str) -> Iterator[str]:
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=[text_key]):
        if first >= block.stop:
            return
        skipped = max(block.start - first, 0)
        if skipped < len(batch):
            for row in batch.slice(skipped, block.stop - first - skipped).to_pylist():
                yield _text_of(row, text_key, block.source)
        first += len(batch)


@lru_cache(maxsize=1)
def _saved_dataset(directory: str) -> Any:
    import datasets  # type: ignore[import-untyped]

    try:
        loaded = datasets.load_from_disk(directory)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{directory} is not a data set saved with save_to_disk ({one_line(error)}); "
            f"give its directory, or single files"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = ", ".join(f"{directory}/{split}" for split in loaded)
        raise DataError(f"{directory} has several splits; give one of {splits}")
    return loaded


def _of_dataset(block: Block, text_key: str) -> Iterator[str]:
    loaded = _saved_dataset(block.source)
    if text_key not in loaded.column_names:
        raise DataError(f"{block.source} has no column {text_key!r}; {nearest(text_key, loaded.column_names)}")
    for row in loaded.select_columns([text_key]).select(range(block.start, block.stop)):
        yield _text_of(row, text_key, block.source)


def _text_of(row: Any, text_key: str, where: object) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(text_key), str):
        raise DataError(f"{where} has no text in field {text_key!r}; name the field with --text-key")
    return str(row[text_key])
