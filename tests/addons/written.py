"""Logs and flight records, written for the doctor, and what it says of them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.addons.doctor.logs import Cause, diagnose
from kit.planner.plan import Plan
from tests.support.files import file_with

SITE = "/opt/env/lib/python3.11/site-packages"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FULL = "OSError: [Errno 28] No space left on device"
TIMED_OUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=1800000)"
TABLE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_17:16:0{second}
  host      : node-{node}
  rank      : {rank} (local_rank: {local})
  exitcode  : 1 (pid: 3954)
"""
Files = Sequence[str] | Mapping[str, Sequence[str] | Mapping[str, Any]]
"""Lines of one log, or name → lines of a log, or a flight record."""


def read(directory: Path, files: Files, plan: Plan | None = None) -> tuple[Cause, ...]:
    """Diagnosis of a directory with these files alone."""
    for name, content in (files if isinstance(files, Mapping) else {"all.log": files}).items():
        text = pickle.dumps(content) if isinstance(content, Mapping) else "\n".join([*content, ""])
        file_with(directory / name, text)
    return diagnose([directory], plan)


def say(causes: Sequence[Cause], *expected: tuple[str, ...]) -> None:
    """One finding for each of ``expected``, in this order: it begins with the first words, and holds the others, but
    for those behind an exclamation mark."""
    told = [f"{cause}\n  weight {cause.weight}\n" for cause in causes]
    assert len(told) == len(expected), told
    for text, (begins, *holds) in zip(told, expected, strict=True):
        assert text.startswith(begins)
        assert [words for words in holds if (words.removeprefix("!") in text) == words.startswith("!")] == [], text


def trace(error: str, mark: str = "", function: str = "main") -> list[str]:
    """A traceback of one frame."""
    lines = ["Traceback (most recent call last):", f'  File "/t.py", line 4, in {function}', "    work()", error]
    return [f"{mark}{line}" for line in lines]


def timed_out(rank: int, number: int, op: str) -> str:
    """NCCL's word of a call that did not end."""
    return (
        f"[rank{rank}]:[E1120 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn=1, Timeout(ms)=600000) ran for 600060 milliseconds"
    )


def call(
    number: int,
    group: str = "0",
    at: int | None = None,
    dtype: str = "Float",
    name: str = "all_reduce",
    sizes: Sequence[int] = (8,),
    described: str = "undefined",
) -> dict[str, Any]:
    """Entry of a collective in a flight record: call ``number`` of its group, at a time that is the number's unless
    given."""
    return {
        "process_group": (group, described),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [list(sizes)],
        "input_dtypes": [dtype],
        "time_created_ns": number if at is None else at,
        "is_p2p": False,
    }


def p2p(words: str, at: int, state: str = "started", retired: bool = False, number: int = 1) -> dict[str, Any]:
    """Entry of a send or receive, as ProcessGroupNCCL records it; the words count ranks within the group, and calls of
    a batch have one number."""
    changes = {"p2p_seq_id": number, "state": state, "retired": retired, "is_p2p": True}
    return call(0, "7", at, "BFloat16", words, (4, 8), "pp") | changes


def flight(calls: Mapping[int, Sequence[dict[str, Any]]], **groups: str) -> dict[str, Any]:
    """A record of each rank. ``groups``: ``g7="[0, 1]"`` lists the ranks of group 7."""
    config = {name[1:]: {"ranks": ranks} for name, ranks in groups.items()}
    return {
        f"flight/rank_{rank}": {"version": "2.10", "pg_config": config, "entries": [*made]}
        for rank, made in calls.items()
    }
