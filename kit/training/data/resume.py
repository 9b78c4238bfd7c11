"""A conversion that may be interrupted at any moment, by SIGKILL too, and goes on where it stopped.

PREFIX.resume.partial says up to which place of the sources PREFIX.bin.partial and PREFIX.lengths.partial are complete.
It is replaced atomically, after these have been flushed to the disk.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kit.errors import DataError
from kit.training.checkpoint.files import write_json
from kit.training.data.indexed import Sidecar
from kit.training.data.indexed_writer import (
    PairFormat,
    PairWriter,
    TokenBlock,
    Written,
    refuse_existing_pair,
    reopen_complete,
)
from kit.training.data.sources import Source

COMMIT_S = 5.0
"""Seconds between two records of the place: at most so much work is done again."""


@dataclass(frozen=True)
class Mark:
    """A place in the sources, and what the pair has of all text before it."""

    source: int = 0
    """Number of the source."""
    position: int = 0
    """In it, in the units of ``Block``."""
    written: Written = Written()  # noqa: RUF009
    bin_sha256: str = ""


@dataclass(frozen=True)
class _State:
    """Content of PREFIX.resume.partial."""

    made_from: dict[str, Any]
    """What the tokens depend on: the tokenizer, options, names of sources."""
    versions: list[str]
    """Versions of the sources that were begun."""
    mark: Mark
    source_start: Mark
    """Beginning of the mark's source."""
    complete: bool
    """Whether the files are given their names."""


class ResumableWriter:
    """Writes a pair from numbered sources, and begins at ``mark``: the place where an earlier process stopped.

    A source that changed after its text was partly written is read again from its beginning. Raises DataError, which
    names what differs, if what is half done was made from something else.
    """

    def __init__(
        self,
        prefix: str,
        pair: PairFormat,
        made_from: dict[str, Any],
        sources: Sequence[Source],
        commit_s: float = COMMIT_S,
    ) -> None:
        self._prefix, self._made_from, self._commit_s = prefix, made_from, commit_s
        self._versions = [source.version for source in sources]
        self._path = Path(f"{prefix}.resume.partial")
        state = self._earlier()
        if state is None or not state.complete:
            refuse_existing_pair(prefix)
        if state is not None:
            self._refuse_another(state, sources)
            if state.complete:
                reopen_complete(prefix)
        self.mark = self._source_start = Mark()
        if state is not None:
            self._source_start = state.source_start
            same = state.versions[state.mark.source] == self._versions[state.mark.source]
            self.mark = state.mark if same else state.source_start
        self.resumed_documents = self.mark.written.num_documents
        self._files = PairWriter(prefix, pair, None if state is None else self.mark.written, self.mark.bin_sha256)
        self._committed_s, self._complete = time.monotonic(), False

    def _earlier(self) -> _State | None:
        if not self._path.is_file():
            return None
        try:
            return _state(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._anew(f"{self._path} is not the state of a conversion ({error})") from error

    def _refuse_another(self, state: _State, sources: Sequence[Source]) -> None:
        for key, new in self._made_from.items():
            old = state.made_from.get(key)
            if old == new:
                continue
            if isinstance(old, list) and isinstance(new, list):
                number, (old, new) = next(
                    (n, pair) for n, pair in enumerate(zip_longest(old, new), 1) if pair[0] != pair[1]
                )
                key = f"{key} {number}"
            raise self._anew(
                f"what is half done of {self._prefix} was made with {key}={old} and this command has {new}; give the "
                "same again"
            )
        for source, old in zip(sources[: state.mark.source], state.versions, strict=False):
            if source.version != old:
                raise self._anew(
                    f"{source.name} is another since its text was written to {self._prefix}.bin.partial ({old}, now "
                    f"{source.version}); restore it"
                )

    def _anew(self, what: str) -> DataError:
        return DataError(f"{what}, or remove {self._prefix}.*.partial to begin anew")

    def append(self, block: TokenBlock, source: int, position: int) -> None:
        """Append the text of a source up to ``position``."""
        if source != self.mark.source:
            self._source_start = Mark(source, 0, self._files.written, self._files.bin_sha256())
        self._files.append(block)
        self.mark = Mark(source, position, self._files.written)
        if time.monotonic() - self._committed_s >= self._commit_s:
            self._commit()

    def _commit(self) -> None:
        self._files.sync()
        self.mark = dataclasses.replace(self.mark, bin_sha256=self._files.bin_sha256())
        versions = self._versions[: self.mark.source + 1]
        state = _State(self._made_from, versions, self.mark, self._source_start, self._complete)
        try:
            write_json(self._path, dataclasses.asdict(state))
        except OSError as error:
            raise self._files.failed(error) from error
        self._committed_s = time.monotonic()

    def finish(self, upload: Callable[[], None] | None = None) -> Sidecar:
        """Give the files their names. Raises DataError if there is nothing to write. ``upload``: what the same command
        does again after an interruption."""
        if self._files.written.num_sequences:
            self._complete = True
            self._commit()
        sidecar = self._files.complete()
        if upload is not None:
            upload()
        self._path.unlink()
        self._files.close(remove=True)
        return sidecar

    def stop(self) -> int:
        """Record the place, and close the files; returns the number of documents that are kept. If there are none,
        nothing is left behind."""
        kept = self._files.written.num_documents
        try:
            if kept and not os.path.exists(self._prefix + ".bin"):
                self._commit()
        finally:
            self._files.close(remove=not kept)
            if not kept:
                self._path.unlink(missing_ok=True)
        return kept


def _state(words: dict[str, Any]) -> _State:
    marks = {
        key: Mark(**{**words[key], "written": Written(**words[key]["written"])}) for key in ("mark", "source_start")
    }
    return _State(**{**words, **marks})
