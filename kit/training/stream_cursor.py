"""Where a streamed run stands in its sources: so that a resumed run need not read them from their start.

Cursors save time only. Every sample follows from the sources, the recipe and its position.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Annotated

from kit.errors import CheckpointError
from kit.specs.validation import Within, stored

_Number = Annotated[int, Within(ge=0, lt=2**63)]


@stored
class StreamCursor:
    """Where a window of a virtual stream begins."""

    stream: _Number
    window: _Number = 0
    """Number of the window in the stream, over all epochs."""
    epoch: _Number = 0
    block: _Number = 0
    """Number in the epoch of the block of documents in which the window begins."""
    file: _Number = 0
    """Place in the epoch's order of the stream's files."""
    document: _Number = 0
    """Number in that file of the block's first document."""
    offset: _Number = 0
    """Tokens of the block before the window."""


@stored
class StreamState:
    """The cursors of a checkpoint, and what they belong to."""

    made_from: dict[str, str]
    """What the samples follow from, beside the files."""
    files: tuple[str, ...]
    """A hash of name and version of each file."""
    bookmarks: tuple[StreamCursor, ...]

    def check(self, made_from: dict[str, str], files: tuple[str, ...], names: tuple[str, ...]) -> None:
        """Raises CheckpointError, which names what differs, if a run streams something else. ``names``: of its
        files."""
        for key, new in made_from.items():
            if (old := self.made_from.get(key)) != new:
                raise _another(f"was made with {key}={old}, and this run has {new}; give the same again")
        if len(files) != len(self.files):
            raise _another(f"is of {len(self.files):,} files, and there are {len(files):,}; give the same again")
        for name, new, old in zip_longest(names, files, self.files):
            if new != old:
                raise _another(f"is of other files: {name} has another name, size, time or ETag; restore it")


def newest(cursors: Iterable[StreamCursor]) -> tuple[StreamCursor, ...]:
    """The last cursor of each stream."""
    last = {mark.stream: mark for mark in sorted(cursors, key=lambda mark: mark.window)}
    return tuple(last[stream] for stream in sorted(last))


def _another(what: str) -> CheckpointError:
    return CheckpointError(
        f"run.data.stream: the checkpoint {what}. Weights can be trained on other data in a new run (run.model_path)"
    )
