"""Tokenises blocks on several processes, and returns them in their order."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from kit.errors import DataError
from kit.training.data.encoder import Encoding
from kit.training.data.encoding_worker import ask
from kit.training.data.indexed_writer import TokenBlock
from kit.training.data.sources import Block

_AHEAD = 3
"""Blocks per process that are tokenised or wait for their turn."""

_Process = subprocess.Popen[bytes]


def encoded(encoding: Encoding, blocks: Iterable[Block], count: int) -> Iterator[TokenBlock]:
    """The tokens of each block, in order, from ``count`` processes. Raises DataError for the first bad block, after the
    blocks before it."""
    with _processes(encoding, count) as processes, ThreadPoolExecutor(count) as threads:
        idle: SimpleQueue[_Process] = SimpleQueue()
        for process in processes:
            idle.put(process)
        coming: deque[Future[TokenBlock]] = deque()
        try:
            for block in blocks:
                coming.append(threads.submit(_encode, idle, block))
                if len(coming) >= _AHEAD * count:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for future in coming:
                future.cancel()
            for process in processes:
                process.kill()  # ends what a thread still waits for


def _encode(idle: SimpleQueue[_Process], block: Block) -> TokenBlock:
    process = idle.get()
    try:
        return ask(_pipe(process.stdin), _pipe(process.stdout), block)
    except EOFError:
        raise DataError(
            f"{block.source}: a process that tokenises ended with exit code {process.wait()} at {block.start}; if "
            "memory ran out, use fewer: --workers"
        ) from None
    finally:
        idle.put(process)


@contextmanager
def _processes(encoding: Encoding, count: int) -> Iterator[list[_Process]]:
    root = str(Path(__file__).parents[3])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "kit.training.data.encoding_worker"]
    processes: list[_Process] = []
    try:
        for _ in range(count):
            # In a group of their own: Ctrl-C is for the writer.
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
            )
            processes.append(process)
            pipe = _pipe(process.stdin)
            pipe.write(json.dumps(dataclasses.asdict(encoding)).encode() + b"\n")
            pipe.flush()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for end in (process.stdin, process.stdout):
                with suppress(OSError):  # what the process did not take
                    _pipe(end).close()


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end
