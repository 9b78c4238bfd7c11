"""What a conversion reads: text, JSON Lines, Parquet and saved data sets, from disks and object storage, row by row."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kit.errors import DataError, KitError
from kit.object_storage import is_address, open_filesystem
from kit.specs.text import nearest
from kit.training.data.tokenizers import one_line
from kit.training.hub_files import data_set_files, is_data_set

TEXT_SUFFIXES = (".txt", ".text", ".md")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
DATA_SETS = "hf://datasets/"
"""Address of the data sets of the hub, as huggingface_hub's file system has it; a recipe names one by it."""
SUFFIXES = (*TEXT_SUFFIXES, *_JSON_SUFFIXES, ".parquet")
_BATCH_ROWS = 1000


@dataclass(frozen=True)
class Source:
    """A file, an object at an address such as ``s3://bucket/part-1.jsonl``, or the directory of a saved data set."""

    name: str
    num_bytes: int

    @property
    def suffix(self) -> str:
        """Suffix of the file; "" for a data set."""
        return "" if Path(self.name).is_dir() else Path(self.name).suffix


Advance = Callable[[int], None]
"""Is told how many bytes of a source were read."""


def find_sources(name: str) -> list[Source]:
    """The source of a path; at an address, whose last part may be a pattern, one or several. Raises DataError if there
    is none, or its kind is unknown."""
    if name.startswith(DATA_SETS):
        return [each for file in data_set_files(name.removeprefix(DATA_SETS)) for each in find_sources(str(file))]
    if is_address(name):
        return _remote(name)
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if not any((path / saved).is_file() for saved in ("state.json", "dataset_dict.json")) and (
            parts := [str(file) for file in files if file.suffix in (".jsonl", ".ndjson", ".parquet")]
        ):
            return [each for part in parts for each in find_sources(part)]
    elif path.is_file():
        files = [path]
        _check_suffix(name)
    elif path.suffix not in SUFFIXES and is_data_set(name):
        return find_sources(DATA_SETS + name)
    else:
        raise DataError(
            f"{name} does not exist; give text, .jsonl or .parquet files, a saved data set, or the id of one on the hub"
        )
    return [Source(name, sum(file.stat().st_size for file in files))]


def _remote(address: str) -> list[Source]:
    filesystem, path = open_filesystem("source", address)
    with _reader_errors(address):
        pattern = any(letter in path for letter in "*?[")
        infos = filesystem.glob(path, detail=True).values() if pattern else [filesystem.info(path)]
    found = []
    for info in sorted(infos, key=lambda info: str(info["name"])):
        if info["type"] == "file":
            name = filesystem.unstrip_protocol(info["name"])
            _check_suffix(name)
            found.append(Source(name, int(info["size"])))
    if not found:
        raise DataError(f"{address} names no file; give .jsonl, .parquet or text files, or a pattern that matches some")
    return found


def _check_suffix(name: str) -> None:
    if (suffix := Path(name).suffix) not in SUFFIXES:
        raise DataError(f"{name} has the unknown suffix {suffix!r}; use {', '.join(SUFFIXES)}")


@contextmanager
def _reader_errors(name: str) -> Iterator[None]:
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
    with _reader_errors(name):
        if is_address(name):
            filesystem, path = open_filesystem("source", name)
            with filesystem.open(path, "rb") as file, io.BufferedReader(file) as buffered:  # its lines are quick
                yield buffered
        else:
            with open(name, "rb") as file:
                yield file


def texts(source: Source, text_key: str, advance: Advance) -> Iterator[str]:
    """The documents of a source; a text file is one. Raises DataError."""
    if source.suffix in _JSON_SUFFIXES:
        for where, row in json_rows(source, advance):
            yield _text(row.get(text_key) if isinstance(row, dict) else None, text_key, where)
    elif source.suffix in TEXT_SUFFIXES:
        yield _text_file(source.name)
        advance(source.num_bytes)
    else:
        for _, row in _columns(source, advance, text_key):
            yield _text(row[text_key], text_key, source.name)


def rows(source: Source, advance: Advance) -> Iterator[tuple[str, Any]]:
    """(place for messages, row) of JSON Lines, Parquet or a saved data set. Raises DataError."""
    if source.suffix in TEXT_SUFFIXES:
        raise DataError(f"{source.name}: rows for fine-tuning are read from .jsonl, .parquet or a saved data set")
    return json_rows(source, advance) if source.suffix in _JSON_SUFFIXES else _columns(source, advance)


def _columns(source: Source, advance: Advance, only: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """As ``rows``, of Parquet or a saved data set; with ``only`` that column."""
    numbers = itertools.count(1)
    for found, share in (_of_parquet if source.suffix else _of_dataset)(source.name, only):
        for row in found:
            yield f"{source.name}: row {next(numbers)}", row
        advance(int(source.num_bytes * share))


def json_rows(source: Source, advance: Advance) -> Iterator[tuple[str, Any]]:
    """(place for messages, row) of JSON Lines, or of a .json file with a list of rows; skips blank lines. Raises
    DataError."""
    with _opened(source.name) as file:
        if source.suffix == ".json" and file.read(1) == b"[":
            yield from _of_list(source, b"[" + file.read(), advance)
            return
        if source.suffix == ".json":
            file.seek(0)
        for number, line in enumerate(file, 1):
            advance(len(line))
            if line.strip():
                where = f"{source.name}:{number}"
                try:
                    row = json.loads(line.decode("utf-8"))
                    if b"\\u" in line:  # half of a surrogate pair is JSON, and no text
                        json.dumps(row, ensure_ascii=False).encode()
                except ValueError as error:
                    raise DataError(f"{where} is not JSON Lines ({error}); one JSON object a line is needed") from error
                yield where, row


def _of_list(source: Source, text: bytes, advance: Advance) -> Iterator[tuple[str, Any]]:
    """The rows of a .json file, which are in memory at once."""
    try:
        found = json.loads(text.decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{source.name} is not a JSON list of rows ({error}); mend it") from error
    advance(len(text))
    yield from ((f"{source.name}: row {number}", row) for number, row in enumerate(found, 1))


def _text_file(name: str) -> str:
    with _opened(name) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
        try:
            return text.read()
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not readable as UTF-8 text ({error}); convert it first") from error


def _of_parquet(name: str, only: str | None) -> Iterator[tuple[list[dict[str, Any]], float]]:
    """(rows, share of all rows) of each batch of rows, with all columns or ``only`` one."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    with _opened(name) as opened:
        try:
            file = pyarrow.parquet.ParquetFile(opened)
            columns = _chosen(name, only, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                yield batch.to_pylist(), len(batch) / file.metadata.num_rows
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{name} is not readable as Parquet ({one_line(error)}); copy it again") from error


def _of_dataset(directory: str, only: str | None) -> Iterator[tuple[list[dict[str, Any]], float]]:
    """As ``_of_parquet``, of a saved data set, which is mapped into memory."""
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
    columns = _chosen(directory, only, loaded.column_names)
    for table in loaded.select_columns(columns).with_format("arrow").iter(_BATCH_ROWS):
        yield table.to_pylist(), len(table) / len(loaded)


def _chosen(name: str, only: str | None, columns: list[str]) -> list[str]:
    if only is None:
        return columns
    if only not in columns:
        raise DataError(f"{name} has no column {only!r}; {nearest(only, columns)}")
    return [only]


def _text(text: Any, text_key: str, where: str) -> str:
    if not isinstance(text, str):
        raise DataError(
            f"{where} has no text in field {text_key!r}; rename the field, or name it by --text-key of kit convert data"
        )
    return text
