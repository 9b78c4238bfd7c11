"""Kills a conversion before each of its operations on files, and lets the next process go on.

    python -m tests.training.killed_conversions DIRECTORY

DIRECTORY has ``tokenizer`` and ``*.jsonl``. Prints JSON: the number of places, and those after which files differ.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.training.data import sources
from kit.training.data.tokenise import tokenise
from kit.training.data.tokenizers import load_tokenizer
from tests.training.test_conversion_resume import files

DIRECTORY = Path(sys.argv[1])
COUNT = itertools.count(1)


def killing(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The function, before whose call number ``place`` this process ends."""

    def counted(*arguments: Any, **named: Any) -> Any:
        if next(COUNT) == place:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return counted


def convert(out: Path, place: int) -> int:
    """Convert in a process that ends at a place; its exit status."""
    if (child := os.fork()) == 0:
        os.fsync = killing(os.fsync, place)
        for name in ("rename", "unlink"):
            setattr(Path, name, killing(getattr(Path, name), place))
        try:
            tokenise(sorted(DIRECTORY.glob("*.jsonl")), DIRECTORY / "tokenizer", out, workers=1, commit_s=0)
        except KitError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(2)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sources.BLOCK_BYTES = 97
    load_tokenizer(DIRECTORY / "tokenizer")  # imports transformers once, for all processes
    convert(DIRECTORY / "whole" / "x", 0)
    whole = files(DIRECTORY / "whole" / "x")
    differ = []
    for place in itertools.count(1):
        out = DIRECTORY / f"killed-{place}" / "x"
        if convert(out, place) != signal.SIGKILL:
            break
        for suffix in (".bin.partial", ".lengths.partial"):
            if (torn := Path(f"{out}{suffix}")).exists():
                torn.write_bytes(torn.read_bytes() + b"\x03\x00\x01\x00")  # written after the record
        if not (out.parent / "x.bin").exists() or (out.parent / "x.resume.partial").exists():
            convert(out, 0)
        found = {suffix: data for suffix, data in files(out).items() if suffix != ".lengths.partial"}
        if found != whole:
            differ.append(place)
    print(json.dumps({"places": place - 1, "differ": differ, "files": sorted(whole)}))


if __name__ == "__main__":
    main()
