"""A process that tokenises blocks, which ``encoding_processes`` starts.

Standard input has lines of JSON: an ``Encoding``, then ``Block``s. Standard output has for every block a line of JSON
(counts, or an error) and the bytes of its tokens and lengths. The end of the input ends the process, so it does not
outlive the process that started it, however that ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import IO, Any

import numpy as np

from kit.errors import DataError
from kit.training.data.encoder import Encoder, Encoding
from kit.training.data.indexed_writer import TokenBlock
from kit.training.data.sources import Block


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints does not print into the answers
    encoder = None
    for line in sys.stdin:
        words = json.loads(line)
        if encoder is None:
            encoder = Encoder(Encoding(**words))
            continue
        try:
            _write(answers, encoder.encode(Block(**words)))
        except DataError as error:
            _say(answers, {"error": str(error)})
        answers.flush()


def _write(answers: IO[bytes], block: TokenBlock) -> None:
    counts = {
        "tokens": block.tokens.nbytes,
        "lengths": block.lengths.nbytes,
        "cut": block.cut,
        "dropped": block.dropped,
    }
    _say(answers, {**counts, "dtype": block.tokens.dtype.str})
    answers.write(block.tokens.tobytes())
    answers.write(block.lengths.tobytes())


def _say(answers: IO[bytes], words: dict[str, Any]) -> None:
    answers.write(json.dumps(words).encode() + b"\n")


def ask(questions: IO[bytes], answers: IO[bytes], block: Block) -> TokenBlock:
    """Tokenise a block in such a process. Raises DataError, and EOFError if the process has ended."""
    try:
        questions.write(json.dumps(dataclasses.asdict(block)).encode() + b"\n")
        questions.flush()
    except BrokenPipeError:
        raise EOFError from None
    if not (line := answers.readline()).endswith(b"\n"):
        raise EOFError
    words = json.loads(line)
    if "error" in words:
        raise DataError(words["error"])
    tokens, lengths = answers.read(words["tokens"]), answers.read(words["lengths"])
    if len(lengths) < words["lengths"]:
        raise EOFError
    return TokenBlock(
        np.frombuffer(tokens, words["dtype"]), np.frombuffer(lengths, "<i4"), words["cut"], words["dropped"]
    )


if __name__ == "__main__":
    try:
        _main()
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)  # the process that asked has ended
