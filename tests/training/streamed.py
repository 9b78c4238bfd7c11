"""Text in files of several kinds, for the tests of streams."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from kit.specs.run import DataSpec, StreamSpec
from kit.training.data.stream import StreamSamples
from kit.training.stream_cursor import StreamCursor
from tests.support import tiny
from tests.training.test_tokenise import save_tokenizer

WORDS = [f"w{number}" for number in range(100)]


def texts(count: int, seed: int = 0) -> list[str]:
    """Random documents of 0 to 60 words."""
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, length)) for length in generator.integers(0, 61, count)]


def write(directory: Path, kind: str, documents: Sequence[str], files: int = 1, prefix: str = "part") -> list[Path]:
    """The documents in so many files, in order. ``kind``: jsonl, jsonl.gz, parquet (with small row groups) or txt."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{prefix}-{number}.{kind}" for number in range(files)]
    for number, path in enumerate(paths):
        own = documents[number * len(documents) // files : (number + 1) * len(documents) // files]
        rows = [{"n": place, "text": text} for place, text in enumerate(own)]
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
            continue
        data = "".join(f"{line}\n" for line in (own if kind == "txt" else map(json.dumps, rows))).encode()
        path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else data)
    return paths


READERS = {"jsonl": "json", "jsonl.gz": "json", "parquet": "parquet", "txt": "text"}


def spec(directory: Path, files: Sequence[Path | str], kind: str = "jsonl", **options: Any) -> DataSpec:
    """The data of a recipe, with a tokenizer in ``directory``; ``wrap`` and ``seed`` are of the data."""
    tokenizer = directory / "tokenizer"
    if not tokenizer.exists():
        save_tokenizer(tokenizer, WORDS)  # type: ignore[arg-type]
    ours = {key: options.pop(key) for key in ("wrap", "seed", "validation") if key in options}
    stream = {"path": READERS[kind], "data_files": tuple(map(str, files)), "tokenizer": str(tokenizer)} | options
    return DataSpec(stream=StreamSpec(**stream), **ours)


def samples(data: DataSpec) -> StreamSamples:
    """The samples of a tiny model."""
    return StreamSamples(data, tiny.SEQ_LENGTH, tiny.VOCAB_SIZE)


def all_documents(found: StreamSamples, stream: int, epoch: int = 0) -> list[str]:
    """The documents of a virtual stream in an epoch, as it comes to them."""
    return [text for _, _, text in found._streams[stream]._documents(StreamCursor(stream=stream, epoch=epoch))]
