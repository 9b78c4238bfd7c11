"""A directory that a conversion writes, and goes on with after an interruption.

``.finished.jsonl`` in it has the task, then a line for each file that is complete and flushed to the disk. Lines are
appended: a kill at any moment costs the file that was being written, no more.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import xxhash
from safetensors import SafetensorError

from kit.errors import CheckpointError
from kit.training.checkpoint.files import fsync, partial_name, publish, refuse_existing
from kit.units import GB

_LIST = ".finished.jsonl"


@dataclass(frozen=True)
class FinishedFiles:
    """The complete files of one directory."""

    directory: Path
    _list: TextIO
    _found: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """File → its line in the list of an interrupted process."""

    def once(self, name: str, write: Callable[[], Any]) -> Any:
        """What ``write`` returned when it wrote the file ``name``, in this process or in the interrupted one. It
        returns JSON. Raises OSError, and what ``write`` raises."""
        path = self.directory / name
        if name in self._found:
            return self._found[name]["result"]
        result = write()
        fsync(path)
        self._append({"file": name, "bytes": path.stat().st_size, "result": result})
        return result

    def _append(self, line: dict[str, Any]) -> None:
        self._list.write(_line(line))
        self._list.flush()


def _line(contents: dict[str, Any]) -> str:
    return json.dumps(contents) + "\n"


def task(source: Path, **choices: object) -> str:
    """Hash of what a conversion makes of what: names, sizes and times of the source's files, and the ``choices``."""
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return xxhash.xxh3_128_hexdigest(repr((stats, sorted(choices.items()))).encode())


@contextmanager
def resumable_directory(directory: Path, what: str | None = None) -> Iterator[FinishedFiles]:
    """As ``files.new_directory``, but what an interruption (a signal, a crash) leaves is used by the next process with
    the same ``task`` in ``what`` (None: by no process). A failure leaves no files.

    Raises CheckpointError if ``directory`` exists and is not empty, if another process writes it, or if it cannot be
    written.
    """
    partial = partial_name(directory)
    try:
        refuse_existing(directory)
        partial.mkdir(parents=True, exist_ok=True)
        with open(partial / _LIST, "a+", encoding="utf-8", errors="replace") as listed:
            _lock(listed, directory)
            try:
                found = {} if what is None else _found(partial, listed, what)
                finished = FinishedFiles(partial, listed, found)
                if found:
                    listed.write("\n")  # ends a line that the interruption cut
                    kept_gb = sum(line["bytes"] for line in found.values()) / GB
                    print(
                        f"goes on after an interruption: {len(found)} files, {kept_gb:.1f} GB, are kept",
                        file=sys.stderr,
                    )
                else:
                    _empty(partial)
                    listed.truncate(0)
                    finished._append({"task": what})
                yield finished
                (partial / _LIST).unlink()
                publish(partial, directory)
            except Exception:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"writing {directory} failed: {error}; check the free space and the permissions there"
        ) from error


def _lock(listed: TextIO, directory: Path) -> None:
    try:
        fcntl.flock(listed, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"another process writes {directory} now; wait for it, or choose another directory"
        ) from None


def _found(partial: Path, listed: TextIO, what: str) -> dict[str, dict[str, Any]]:
    """File → its line, of the files that are on the disk in their size. Empty if the list is another task's."""
    listed.seek(0)
    found: dict[str, dict[str, Any]] = {}
    first, *rest = listed.readlines() or [""]
    if first != _line({"task": what}):
        return {}
    for text in rest:
        try:
            line = json.loads(text)
            if (partial / line["file"]).stat().st_size == line["bytes"]:
                found[line["file"]] = {"result": line["result"], "bytes": line["bytes"]}
        except (ValueError, TypeError, KeyError, OSError):
            continue  # the last line, half written; or a file that is gone
    return found


def _empty(partial: Path) -> None:
    for path in partial.iterdir():
        if path.name == _LIST:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            os.unlink(path)
