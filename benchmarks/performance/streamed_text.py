"""Tokens per second of processor time: of `run.data.stream`, of `kit convert data`, and of resuming a stream.

    python -m benchmarks.performance.streamed_text TOKENIZER FILE.jsonl…

Reads one epoch of the files, on one thread.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kit.errors import DataError
from kit.specs.run import DataSpec, StreamSpec
from kit.training.data.stream import StreamSamples
from kit.training.data.tokenise import tokenise
from tests.support.program import run

SEQ_LENGTH = 4096
_VOCAB = 1 << 20


def main(tokenizer: Path, files: Annotated[list[Path], typer.Argument(metavar="FILE...")]) -> int:
    """Always 0."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    stream = StreamSpec(path="json", data_files=tuple(map(str, files)), tokenizer=str(tokenizer), streams=1)

    def opened() -> StreamSamples:
        return StreamSamples(DataSpec(stream=stream, wrap=False), SEQ_LENGTH, _VOCAB)

    samples = opened()
    seconds, count = _measured(lambda: _epoch(samples))
    print(f"stream        {count * SEQ_LENGTH / seconds / 1e6:.2f} M tokens/s ({count:,} samples of {SEQ_LENGTH})")
    with tempfile.TemporaryDirectory() as out:
        seconds, pair = _measured(lambda: tokenise(files, tokenizer, Path(out) / "x", vocab_size=_VOCAB, workers=1))
    print(f"convert data  {pair.sidecar.num_tokens / seconds / 1e6:.2f} M tokens/s")
    place, resumed, anew = samples.place(count - 1), opened(), opened()
    resumed.resume(place)
    for name, reader in (("from a bookmark", resumed), ("from the start", anew)):
        print(f"the last sample {name}: {_measured(lambda reader=reader: reader.read(count - 1))[0]:.2f} s")  # type: ignore[misc]
    return 0


def _measured(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def _epoch(samples: StreamSamples) -> int:
    count = 0
    try:
        while True:
            samples.read(count)
            count += 1
    except DataError:  # wrap=false
        return count


if __name__ == "__main__":
    run(main)
