"""Ranks as forks of one process that has imported the engines: a start costs a second, not ten.

Each rank then is what a launcher would start: ``kit.training``'s own ``main`` with RANK and its kin in the environment.
A fork server imports and forks; it starts no thread and no process group itself.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.support.runs import free_port

WORLD_SIZE = 2
LIMIT_S = 240
"""No run here takes half a minute on an idle machine."""
NOTICE_S = 20
"""Survivors of a kill notice a closed connection at once; a launcher would not wait longer."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.system.kills.worker"])


@dataclass(frozen=True)
class Job:
    """The ranks of one run."""

    ranks: list[ForkServerProcess]

    @classmethod
    def start(cls, rundir: Path, *words: str) -> Job:
        """All ranks of a run directory, their output appended to ``log.txt``."""
        from tests.system.kills.worker import rank_main

        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        given = [(str(rundir), words, rank, WORLD_SIZE, port) for port in [free_port()] for rank in range(WORLD_SIZE)]
        ranks = [_context.Process(target=rank_main, args=each) for each in given]
        for rank in ranks:
            rank.start()
        return cls(ranks)

    @property
    def alive(self) -> bool:
        """Whether any rank runs."""
        return any(rank.is_alive() for rank in self.ranks)

    def kill(self, victims: list[int]) -> None:
        """SIGKILL to these ranks at once; the others get ``NOTICE_S`` to end, as a launcher would let them, and then
        are killed too."""
        for victim in victims:
            self.ranks[victim].kill()
        self._end(NOTICE_S)

    def wait(self) -> list[int | None]:
        """Exit codes; after ``LIMIT_S`` all are killed."""
        self._end(LIMIT_S)
        return [rank.exitcode for rank in self.ranks]

    def _end(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        for rank in self.ranks:
            rank.kill()
            rank.join()
