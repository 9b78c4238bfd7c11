"""Training samples out of text that is tokenised while the run trains (``run.data.stream``).

The recipe cuts the sources into V virtual streams, whatever the layout: position k of the run is window k // V of
virtual stream k mod V. A stream goes through its files epoch by epoch. It shuffles the order of the files, and the
documents of every block, by the seed. So a window follows from sources, recipe and position, and from nothing else.
Within an epoch windows are cut out of the documents as ``GptSamples`` cuts them out of a pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from threading import Lock

import numpy as np

from kit.engines.collective import gather
from kit.engines.protocol import MicroBatch
from kit.errors import DataError
from kit.specs.run import DataSpec
from kit.training.data.samples import TrainingSamples, of_windows
from kit.training.data.shuffle import permuted_index
from kit.training.data.stream_source import StreamSource, open_source
from kit.training.data.tokenize_rows import DocumentTokenizer
from kit.training.stream_cursor import StreamCursor, StreamState, newest

_MOST_STREAMS = 64
"""Most virtual streams that kit chooses: few enough that the first step is not long in coming."""
_READ_DOCUMENTS = 1000
"""Documents in a block that is not shuffled."""
_CURSORS = 1024
"""Cursors of a stream that are kept: more than the blocks that a thread reads ahead."""


@dataclass(frozen=True)
class _Reading:
    """What all virtual streams of a run share."""

    source: StreamSource
    encoder: DocumentTokenizer
    streams: int
    seed: int
    shuffle_block: int
    seq_length: int
    wrap: bool


class VirtualStream:
    """The numbered windows of one virtual stream. Reads on from its last window, or again from a cursor."""

    def __init__(self, number: int, reading: _Reading) -> None:
        self._number, self._reading = number, reading
        self._cursors = [StreamCursor(stream=number)]
        self._windows: Iterator[np.ndarray] | None = None
        self._next = 0

    def window(self, number: int) -> np.ndarray:
        """int64, (sequence length + 1,). Raises DataError."""
        nearest = self.cursor(number)
        if self._windows is None or not nearest.window <= self._next <= number:
            self._windows, self._next = self._read(nearest), nearest.window
        windows, self._windows = self._windows, None  # an error ends them
        found = next(islice(windows, number - self._next, None))
        self._windows, self._next = windows, number + 1
        return found.astype(np.int64)

    def cursor(self, number: int) -> StreamCursor:
        """The last known cursor that is not after a window."""
        return next(mark for mark in reversed(self._cursors) if mark.window <= number)

    def remember(self, cursor: StreamCursor) -> None:
        """Add a cursor to the known ones: one for each block in which a window begins."""
        last = self._cursors[-1]
        if (cursor.epoch, cursor.block) > (last.epoch, last.block):
            self._cursors.append(cursor)
            del self._cursors[1:-_CURSORS]

    def _read(self, start: StreamCursor) -> Iterator[np.ndarray]:
        """Windows from a cursor on, without end if the data wrap."""
        reading, streams = self._reading, self._reading.streams
        while True:
            count = 0
            for window in self._epoch(start):
                yield window
                count += 1
            end = start.window + count
            if not count:
                raise DataError(
                    f"run.data.stream: virtual stream {self._number} of {streams} has less text than one sample of "
                    f"seq_length={reading.seq_length}; use fewer streams, shorter sequences, or more data"
                )
            if not reading.wrap:
                raise DataError(
                    f"run.data.wrap=false: virtual stream {self._number} of {streams} ends after {end:,} samples, so "
                    f"the run has none after {end * streams + self._number:,}; end it there (run.steps), or use "
                    "wrap=true"
                )
            start = StreamCursor(stream=self._number, window=end, epoch=start.epoch + 1)

    def _epoch(self, start: StreamCursor) -> Iterator[np.ndarray]:
        """The windows of an epoch from a cursor on."""
        length, text, cursor = self._reading.seq_length, np.zeros(0, np.int32), start
        for place, tokens in self._blocks(start):
            text = np.concatenate([text, tokens[start.offset if place is start else 0 :]])
            while len(text) > length:
                self.remember(cursor)
                yield text[: length + 1]
                text = text[length:]
                offset = len(tokens) - len(text)
                cursor = dataclasses.replace(place, window=cursor.window + 1, offset=offset)

    def _blocks(self, start: StreamCursor) -> Iterator[tuple[StreamCursor, np.ndarray]]:
        """(its beginning, int32 tokens) of each block of an epoch, from a cursor's block on."""
        reading, shuffled = self._reading, self._reading.shuffle_block > 1
        seed = reading.seed + ((start.epoch * reading.streams + self._number + 1) << 32)  # seeds have 32 bits
        documents, place = self._documents(start), start
        while found := list(islice(documents, reading.shuffle_block if shuffled else _READ_DOCUMENTS)):
            texts, count = [text for _, _, text in found], len(found)
            if shuffled:
                texts = [texts[permuted_index(seed, count, place.block * count + k)] for k in range(count)]
            ids = chain.from_iterable(reading.encoder.documents(iter(texts)))
            yield place, np.fromiter(ids, dtype=np.int32)
            file, document, _ = found[-1]
            place = dataclasses.replace(place, block=place.block + 1, file=file, document=document + 1)

    def _documents(self, start: StreamCursor) -> Iterator[tuple[int, int, str]]:
        """(place of its file in the epoch's order, number in the file, text) of each document from a cursor on.

        Streams share files, or files streams: of n files stream v has v, v + V, …; if V > n it has every so-many-th
        document of file v mod n.
        """
        reading, source = self._reading, self._reading.source
        files = range(self._number % len(source.names), len(source.names), reading.streams)
        share = len(range(files[0], reading.streams, len(source.names)))
        for at in range(start.file, len(files)):
            file = (
                files[permuted_index(reading.seed, len(files), start.epoch * len(files) + at)]
                if reading.shuffle_block > 1
                else files[at]
            )
            first = start.document if at == start.file else 0
            for number, text in source.documents(file, first, share, self._number // len(source.names)):
                yield at, number, text


class StreamSamples(TrainingSamples):
    """The windows of all virtual streams, by position. Raises DataError for sources or a tokenizer that cannot be read,
    or do not fit."""

    def __init__(self, data: DataSpec, seq_length: int, vocab_size: int) -> None:
        spec = data.stream
        assert spec is not None
        source = open_source(spec)
        encoder = DocumentTokenizer(spec.tokenizer, vocab_size=vocab_size)
        streams = spec.streams or min(_MOST_STREAMS, 1 << (len(source.names).bit_length() - 1))
        self._reading = _Reading(source, encoder, streams, data.seed, spec.shuffle_block, seq_length, data.wrap)
        self._streams = [VirtualStream(number, self._reading) for number in range(streams)]
        self._lock = Lock()  # a thread reads ahead
        self._made_from = {
            "tokenizer": f"{encoder.pair.tokenizer} ({encoder.fingerprint()})",
            "text_key": spec.text_key,
            "streams": str(streams),
            "shuffle_block": str(spec.shuffle_block),
            "data.seed": str(data.seed),
            "seq_length": str(seq_length),
        }

    def drawn(self, seed: int, position: int) -> int:
        """The position itself: the streams are shuffled."""
        return position

    def length(self, index: int) -> int:
        """The sequence length, for all samples."""
        return self._reading.seq_length

    def read_all(self, indices: Sequence[int | None]) -> list[np.ndarray]:
        """The windows at these positions."""
        return [self.read(index or 0) for index in indices]

    def read(self, index: int) -> np.ndarray:
        """The window at a position."""
        window, stream = divmod(index, len(self._streams))
        with self._lock:
            return self._streams[stream].window(window)

    def collate(self, samples: Sequence[np.ndarray]) -> MicroBatch:
        """Micro batch of windows."""
        return of_windows(np.stack(samples))

    def place(self, position: int) -> StreamState:
        """Collective. Where a run stands whose next sample is at ``position``, as far as any rank knows."""
        count = len(self._streams)
        with self._lock:
            mine = [stream.cursor(-((number - position) // count)) for number, stream in enumerate(self._streams)]
        cursors = newest(mark for of_rank in gather(mine) for mark in of_rank)
        return StreamState(made_from=self._made_from, files=self._reading.source.digests, bookmarks=cursors)

    def resume(self, place: StreamState) -> None:
        """Read on from the cursors of a checkpoint. Raises CheckpointError if it is of something else."""
        place.check(self._made_from, self._reading.source.digests, self._reading.source.names)
        for mark in place.bookmarks:
            self._streams[mark.stream].remember(mark)
