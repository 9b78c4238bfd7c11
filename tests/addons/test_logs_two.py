"""The doctor with two of anything: ranks, nodes, steps, groups, runs. Neighbours read inputs that differ in one thing,
so that an answer for the wrong one of them is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

import kit
from kit.addons.doctor.logs import diagnose
from kit.addons.doctor.logs.metrics import metrics_files
from kit.addons.doctor.logs.scan import Scan
from tests.addons.written import FULL, OOM, TABLE, TIMED_OUT, Files, call, flight, read, say, trace
from tests.support.files import file_with

SAID = "RuntimeError: Detected mismatch between collectives on ranks."
CRASHED = "  rank      : 1 (local_rank: 1)\n  exitcode  : -6\n  traceback : Signal 6 (SIGABRT) received by PID 12"
BY_TORCHRUN = "E1126 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 22958) of binary: python"
LAUNCHER_KILLED = "W Unable to shutdown process 11 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL"
KILLED = "  rank      : {0} (local_rank: {0})\n  exitcode  : -9\n  traceback : Signal 9 (SIGKILL) received by PID {1}"
CHAIN = "During handling of the above exception, another exception occurred:"
FALLS = [6.0, 5.0, 4.0, 3.5, 3.2, 3.1, 3.0]
TO_ZERO = {0: [2.5, 2.4, 2.2, 2.1, 2.0, 1.9], 1: [2.5, 2.4, 2.2, 0.0, 0.0, 0.0]}
NOT_TO = "rank {} did not come to all_reduce number {} of group {}"


def losses(*ranks: list[float]) -> list[str]:
    """Losses of ranks 0, 1, … in turn."""
    return [
        f"[rank{rank}] step {step} loss {value}"
        for step, values in enumerate(zip(*ranks, strict=True), start=1)
        for rank, value in enumerate(values)
    ]


def times(*ranks: float, steps: int = 9) -> list[str]:
    """Working times of ranks 0, 1, …"""
    return [
        f"[rank{rank}] step {i} loss 1.0 work_time_s {each}" for i in range(steps) for rank, each in enumerate(ranks)
    ]


def steps_of(*steps: int) -> list[str]:
    return [json.dumps({"step": step, "loss": 3.0}) for step in steps]


def experts(dead: list[int], load: list[float]) -> list[str]:
    rows = zip(range(1, len(dead) + 1), dead, load, strict=True)
    return [json.dumps({"step": step, "expert_load_max": most, "dead_experts": idle}) for step, idle, most in rows]


def slow(rank: int, step: int, what: str = "slow rank", **more: Any) -> str:
    return json.dumps({"event": what, "rank": rank, "host": f"node-{rank}", "step": step, "ratio": 1.8} | more)


def table(second: int, node: int, rank: int) -> list[str]:
    return TABLE.format(second=second, node=node, rank=rank, local=3).splitlines()


LATER, FIRST = ["[rank3]: step 9", f"[rank3]: {OOM}"], ["[rank1]: step 4", f"[rank1]: {OOM}"]
UP_TO = {0: 3, 1: 2, 2: 1}
TWO = {rank: [call(1), call(2)] for rank in (1, 2)}
GROUPS = {0: [call(1, "5"), call(2, "5")], 1: [call(1, "5"), call(2, "5")]}
OF_THREE = {
    0: [call(1, at=10), call(1, "1", 20, name="all_gather", described="tp"), call(2, at=90, name="barrier")],
    1: [call(1, at=11), call(1, "1", 21, name="broadcast", described="tp"), call(2, at=91, name="barrier")],
    2: [call(1, at=12), call(2, at=80)],
}
CASES: dict[str, tuple[Files, tuple[tuple[str, ...], ...]]] = {
    "of ranks that stopped at three places the earliest is missing": (
        flight({rank: [call(number) for number in range(1, last + 1)] for rank, last in UP_TO.items()}),
        (("collective-timeout on rank 0, 1: ", NOT_TO.format(2, 2, 0) + ", sizes [[8]]", "3 ranks"),),
    ),
    "the record that is named has the call": (
        flight({0: [call(1)], **TWO}),
        (("collective-timeout on rank 1, 2: ", "seen   rank_1:", NOT_TO.format(0, 2, 0)),),
    ),
    "two ranks are missing": (
        flight({0: [call(1)], 3: [call(1)], **TWO}),
        (("collective-timeout on rank 1, 2: ", NOT_TO.format("0, 3", 2, 0)),),
    ),
    "without a call in the group of all": (
        flight({0: [call(1)], 1: [call(1)], 2: [call(1, "1", name="all_gather", sizes=[4])]}),
        (("collective-timeout on rank 0, 1: ", NOT_TO.format(2, 1, 0)),),
    ),
    "a group's name is told with what it is for": (
        flight({0: [call(1, described="default_pg")], 1: [call(1), call(2, described="default_pg")]}),
        (("collective-timeout on rank 1: ", NOT_TO.format(0, 2, "0 (default_pg)")),),
    ),
    "the records agree": (flight(TWO), ()),
    "a loss is infinite, and not inferred": (
        ["info: loss is inferred", "loss is nanometers", "loss is infinity"],
        (("not-a-number", "seen   all.log:3: loss is infinity"),),
    ),
    "ranks of a group whose records are not here": (flight(GROUPS, g5="[0, 1, 2, 3]"), ()),
    "a rank of a group whose record is here": (
        flight(GROUPS | {2: [call(1, "6")]}, g5="[0, 1, 2]", g6="[2]"),
        (("collective-timeout on rank 0, 1: ", NOT_TO.format(2, 1, 5)),),
    ),
    "calls of two types differ": (
        flight({rank: [call(1, dtype="BFloat16" if rank == 2 else "Float")] for rank in range(3)}),
        (("mismatched-collectives on rank 2: ", "at all_reduce number 1 of group 0, sizes [[8]], rank 2 called "
          "all_reduce of [[8]] BFloat16\n", "seen   rank_0: "),),
    ),
    "calls of two kinds and sizes differ": (
        flight({0: [call(2)], 1: [call(2, name="all_gather", sizes=[4])], 2: [call(2)], 3: [call(2, sizes=[9])]}),
        (("mismatched-collectives on rank 1, 3: ", "number 2 of group 0, sizes [[8]], rank 1 called all_gather of [[4]]"
          " Float; rank 3 called all_reduce of [[9]] Float\n"),),
    ),
    "the first rank is the one that differs": (
        flight({0: [call(1, name="all_gather")], 1: [call(1)], 2: [call(1)]}),
        (("mismatched-collectives on rank 0: ", "at all_reduce number 1 of group 0, sizes [[8]], rank 0 called "
          "all_gather of [[8]] Float\n", "seen   rank_1: "),),
    ),
    "of a loss without steps only a fall to zero is told": (
        [f"{{'loss': {loss}}}" for loss in [*FALLS, *[9.0] * 9]], (),
    ),
    # Rank 0 made many calls in other groups, and its ring buffer holds its last ones only.
    "a call that one record has forgotten is compared among the others": (
        flight({0: [call(4)], 1: [call(3), call(4)], 2: [call(3, name="broadcast"), call(4)], 3: [call(3), call(4)]}),
        (("mismatched-collectives on rank 2: ", "number 3 of group 0"),),
    ),
    "the call that a rank did not come to is told by one that has it": (
        flight({0: [call(5)], 1: [call(1)], 2: [call(1), call(2, sizes=[3])]}),
        (("collective-timeout on rank 0, 2: ", f"{NOT_TO.format(1, 2, 0)}, sizes [[3]]", "seen   rank_2:"),),
    ),
    "a call that no record has any more": (flight({0: [call(5)], 1: [call(1)]}), ()),
    # In group A the call was issued at 10 and by its last rank at 100; in B at 50 and 60.
    "of two groups the one whose call was issued first parted first": (
        flight({
            0: [call(1, "A", 1), call(2, "A", 10), call(1, "B", 2), call(2, "B", 50)],
            1: [call(1, "A", 1), call(2, "A", 100), call(1, "B", 2), call(2, "B", 60)],
            2: [call(1, "A", 1), call(1, "B", 2)],
        }),
        (("collective-timeout on rank 0, 1: ", "number 2 of group A, "),),
    ),
    # In group A the call was issued at 10 by rank 1, and at 100 by rank 0.
    "of two groups the one whose call any rank issued first": (
        flight({
            0: [call(1, "A", 1), call(2, "A", 100), call(1, "B", 2), call(2, "B", 50)],
            1: [call(1, "A", 1), call(2, "A", 10), call(1, "B", 2), call(2, "B", 60)],
            2: [call(1, "A", 1), call(1, "B", 2)],
        }),
        (("collective-timeout on rank 0, 1: ", "number 2 of group A, ", "seen   rank_0:"),),
    ),
    "of two groups, and the later one has the smaller name": (
        flight({
            0: [call(1, "A", 1), call(2, "A", 50), call(1, "B", 2), call(2, "B", 10)],
            1: [call(1, "A", 1), call(2, "A", 60), call(1, "B", 2), call(2, "B", 100)],
            2: [call(1, "A", 1), call(1, "B", 2)],
        }),
        (("collective-timeout on rank 0, 1: ", "number 2 of group B, "),),
    ),
    "of two groups the later one has a name that says what it is for": (
        flight({
            0: [call(1, "A", 1), call(2, "A", 10), call(1, "B", 2), call(2, "B", 50, described="tp")],
            1: [call(1, "A", 1), call(1, "B", 2)],
        }),
        (("collective-timeout on rank 0: ", "number 2 of group A, "),),
    ),
    "of two groups that parted at one time the first by name": (
        flight({
            0: [call(1, "B", 1), call(2, "B", 10), call(1, "A", 1), call(2, "A", 10)],
            1: [call(1, "B", 1), call(1, "A", 1)],
        }),
        (("collective-timeout on rank 0: ", "number 2 of group A, "),),
    ),
    # Ranks 0 and 1 part in their own group first; what rank 2 then meets in the group of all is a consequence.
    "the first parting of several groups is the cause": (
        flight(OF_THREE, g0="[0, 1, 2]", g1="[0, 1]"),
        (("mismatched-collectives on rank 1: ", "number 1 of group 1 (tp), sizes [[8]], rank 1 called broadcast"),),
    ),
    "ranks that a record names are those that came": (
        flight({0: [call(1), call(2)], 1: [call(1), call(2)], 2: [call(1)]})
        | {"all.log": ["[rank2]: step 2", f"[rank0]: {TIMED_OUT}"]},
        (("collective-timeout on rank 0, 1: ", f"{NOT_TO.format(2, 2, 0)}, sizes [[8]]\n"),),
    ),
    "a rank that did not come and has a cause of its own": (
        [f"[rank0]: {TIMED_OUT}", f"[rank1]: {FULL}"],
        (("disk-full on rank 1: ",), ("collective-timeout on rank 0: ",
        "rank 1 did not come to ALLREDUCE number 12\n")),
    ),
    "two ranks that did not come": (
        ["[rank16]: step 2", "[rank3]: step 2", f"[rank0]: {TIMED_OUT}"],
        (("collective-timeout on rank 0: ", "rank 3, 16 did not come to ALLREDUCE number 12\n"),),
    ),
    "one slow rank of two": (
        times(1.0, 2.0),
        (("slow-rank on rank 1: works 2 s a step, the others, who wait, 1 s", "[rank1] step 8", "all.log:18"),),
    ),
    "too few steps to call a rank slow": (times(1.0, 2.0, steps=2), ()),
    "just enough steps": (times(1.0, 2.0, steps=3), (("slow-rank on rank 1: ",),)),
    "one and a half times as long is not slow": (times(1.0, 1.5), ()),
    "two slow ranks of five": (times(1.0, 1.0, 1.2, 3.0, 4.0), (("slow-rank on rank 3, 4: works 3 s a step",),)),
    # A rank's level is its median, which one long step does not move.
    "one long step of nine": ([*times(1.0, 1.0, steps=8), "[rank1] step 9 loss 1.0 work_time_s 90.0"], ()),
    "working times without a rank": ([line[8:] for line in times(1.0, 2.0)], ()),
    "two ranks diverge, and the first step is told": (
        losses([*FALLS, 3.0, 3.0, *[9.0] * 5], [*FALLS, *[9.0] * 7]),
        (("loss-divergence on rank 0, 1 at step 8: the loss had come down to 3.2, went up, and is 9 at the end",
          "all.log:16: [rank1] step 8"),),
    ),
    "one rank of two diverges": (
        losses([*FALLS, *[2.9] * 7], [*FALLS, *[9.0] * 7]),
        (("loss-divergence on rank 1 at step 8: the loss had come down to 3.2",),),
    ),
    "one rank's loss of two fell to zero": (
        losses(*TO_ZERO.values()),
        (("loss-zero on rank 1 at step 4: the loss was 2.2 and is exactly 0 since", "all.log:8: [rank1] step 4"),),
    ),
    "one rank's loss of two fell to zero, without steps": (
        [f"[rank{rank}] {{'loss': {TO_ZERO[rank][i]}, 'epoch': 0.{i}}}" for i in range(6) for rank in (1, 0)],
        (("loss-zero on rank 1: the loss was 2.2",),),
    ),
    "a step in the line itself is the step": (
        ["[rank1]: step 5 loss 2.0", f"[rank1]: saving at step 6: {FULL}"],
        (("disk-full on rank 1 at step 6: ",),),
    ),
    "two ranks with one cause are one finding of the first step": (
        [*LATER, *FIRST],
        (("gpu-out-of-memory on rank 1, 3 after step 4: ", "all.log:2", "!and no other"),),
    ),
    "one rank alone": (
        FIRST, (("gpu-out-of-memory on rank 1 after step 4: ", "!and no other", f"seen   all.log:2: {OOM}\n"),),
    ),
    "one rank of two": ([*FIRST, "[rank3]: step 9"], (("gpu-out-of-memory on rank 1 after step 4: ", "and no other"),)),
    "two phases of one act are both told": (
        [*trace(OOM, "[rank0]: ", "forward"), *trace(OOM, "[rank1]: ", "backward")],
        (("gpu-out-of-memory on rank 0, 1 in forward and backward: ",),),
    ),
    "a process that the launcher killed is not the one that was killed": (
        [LAUNCHER_KILLED, KILLED.format(0, 11), KILLED.format(1, 12)],
        (("killed on rank 1: ",),),
    ),
    # torchrun's summary on the second of two nodes: rank 11 is number 3 there.
    "the rank of a killed process is not its number on its node": (
        ["  rank      : 11 (local_rank: 3)", "  exitcode  : -9 (pid: 77)", "  error_file: <N/A>",
         "  traceback : Signal 9 (SIGKILL) received by PID 77"],
        (("killed on rank 11: ",),),
    ),
    "the rank of a killed process where only its number on its node is told": (
        ["E torch: failed (exitcode: -9) local_rank: 3 (pid: 77) of binary: python"], (("killed on rank 3: ",),),
    ),
    "a rank above another cause is not its rank": (
        ["  rank      : 3 (local_rank: 3)", FULL], (("disk-full: ",),),
    ),
    "a rank above a killed process that names its own": (
        ["  rank      : 3 (local_rank: 3)", "[rank1]: exitcode: -9"], (("killed on rank 1: ",),),
    ),
    "many lines of one rank do not hide another's": (
        [*[f"[rank0]: {OOM}"] * 300, f"[rank1]: {OOM}"],
        (("gpu-out-of-memory on rank 0, 1: ",),),
    ),
    "many tracebacks of one rank do not hide another's": (
        [*(line for _ in range(210) for line in trace("KeyError: 'labels'", "[rank0]: ")),
         *trace("ValueError: no labels", "[rank1]: ")],
        (("exception on rank 0: KeyError: 'labels'\n",), ("exception on rank 1: ValueError: no labels\n",)),
    ),
    "an exception that another rank handled is not this rank's": (
        [*trace("OSError: busy", "[rank1]: "), *trace("KeyError: 'a'", "[rank0]: "), "[rank1]: ", f"[rank1]: {CHAIN}",
         "[rank1]: ", *trace("ValueError: b", "[rank1]: ")],
        (("exception on rank 0: KeyError: 'a'\n",), ("exception on rank 1: ValueError: b\n",)),
    ),
    "one exception at two places is two": (
        [*trace("KeyError: 'a'", "[rank0]: ", "load"), *trace("KeyError: 'a'", "[rank1]: ", "collate")],
        (("exception on rank 0: KeyError: 'a'\n  from   /t.py:4 in load\n",),
         ("exception on rank 1: KeyError: 'a'\n  from   /t.py:4 in collate\n",)),
    ),
    "of two nodes' tables the earlier time is the first failure": (
        {"node-0.log": table(1, 0, 3), "node-1.log": table(3, 1, 11)},
        (("worker-failed on rank 3: a process ended first with exit code 1 (pid: 3954) on node-0, and these",),),
    ),
    "and where it is the second's": (
        {"node-0.log": table(3, 0, 3), "node-1.log": table(1, 1, 11)},
        (("worker-failed on rank 11: a process ended first with exit code 1 (pid: 3954) on node-1, and these",),),
    ),
    "a table is no word about two errors without a rank": (
        [*trace("KeyError: 'a'"), *trace("ValueError: b"), *table(1, 0, 3)],
        (("exception: KeyError: 'a'\n",), ("exception: ValueError: b\n",)),
    ),
    "a table names the rank of one error": (
        [*trace("KeyError: 'a'"), *table(1, 0, 3)], (("exception on rank 3: KeyError: 'a'\n",),),
    ),
    "the download of the rank that did not come kept the others": (
        ["[rank1]: Downloading shards: 12%", "[rank1]: step 2", f"[rank0]: {TIMED_OUT}"],
        (("collective-timeout on rank 0: the others waited while rank 1 downloaded (all.log:1)", "shared storage"),),
    ),
    "the download of a rank that came kept nobody": (
        ["[rank0]: Downloading shards: 12%", "[rank1]: step 2", f"[rank0]: {TIMED_OUT}"],
        (("collective-timeout on rank 0: ", "rank 1 did not come", "!downloaded"),),
    ),
    "an expert without tokens": (
        {"metrics.jsonl": experts([1] * 20, [2.0] * 20)}, (("dead-experts at step 20: 1 or more experts",),),
    ),
    "an expert that came back": ({"metrics.jsonl": experts([2] * 19 + [0], [2.0] * 20)}, ()),
    "an expert that idles for a step": ({"metrics.jsonl": experts([0] * 19 + [2], [2.0] * 20)}, ()),
    "one step of a hot expert": ({"metrics.jsonl": experts([0] * 20, [2.0] * 19 + [9.0])}, ()),
    "eleven steps of twenty of a hot expert": (
        {"metrics.jsonl": experts([0] * 20, [2.0] * 9 + [9.0] * 11)}, (("hot-expert at step 20: the fullest",),),
    ),
    # Nine of 4, one 5; nine of 6, one 99.
    "the fewest dead experts are told and the median load": (
        {"metrics.jsonl": experts([3, 2] * 10, [4.0, 6.0] * 9 + [5.0, 99.0])},
        (("dead-experts at step 20: 2 or more experts got no token in any of the last 20 steps", "metrics.jsonl:20"),
         ("hot-expert at step 20: the fullest expert had 5.5 times the mean load in the last 20 steps",)),
    ),
    "a load of three times the mean is not told": ({"metrics.jsonl": experts([0] * 20, [3.0] * 20)}, ()),
    "a router is uneven when it starts": ({"metrics.jsonl": experts([1] * 19, [6.0] * 19)}, ()),
    "uneven at the start alone": (
        {"metrics.jsonl": experts([3] * 3 + [0] * 20, [8.0] * 3 + [1.3] * 20)}, (),
    ),
    "two runs in step with each other": (
        {"metrics.jsonl": steps_of(1, 1, 2, 2, 3, 3)},
        (("two-runs at step 1: two runs wrote into ", "at once: 3 steps stand in metrics.jsonl again, from step 1 on, "
          "though 3 were reached", "metrics.jsonl:2"),),
    ),
    "a second run that starts later": (
        {"metrics.jsonl": steps_of(1, 2, 3, 2, 3, 4)},
        (("two-runs at step 2: ", "2 steps stand in metrics.jsonl again, from step 2 on, though 4 were reached",
          "metrics.jsonl:4"),),
    ),
    "one run": ({"metrics.jsonl": steps_of(1, 2, 3, 4)}, ()),
    "a line longer than what is read of it counts as one": (
        {"metrics.jsonl": [f'{{"text": "{"x" * 9000}"}}', *steps_of(1, 1)]},
        (("two-runs at step 1: ", "metrics.jsonl:3"),),
    ),
    "of two slow ranks in turn the last is named": (
        {"metrics.jsonl": steps_of(1), "events.jsonl": [slow(3, 10), slow(5, 20)]},
        (("slow-rank on rank 5 at step 20: rank 5 on node-5 works 1.8 times as long as the others, who wait for it, "
          "since step 20", "events.jsonl:2"),),
    ),
    "a slow rank that kept pace again": (
        {"metrics.jsonl": steps_of(1), "events.jsonl": [slow(3, 10), slow(3, 20, "slow rank recovered")]}, (),
    ),
    "a slow rank without a ratio, then another event": (
        {"metrics.jsonl": steps_of(1), "events.jsonl": [slow(3, 10, ratio=None), slow(4, 20, "checkpoint"), "{"]},
        (("slow-rank on rank 3 at step 10: rank 3 on node-3 works longer than the others",),),
    ),
    # torchrun counts on its node; srun counts in the job.
    "of two launchers the one that knows the rank": (
        [BY_TORCHRUN, "srun: error: node-2: task 11: Exited with exit code 1"],
        (("worker-failed on rank 11: a process ended first with exit code 1,", "all.log:2"),),
    ),
    "a launcher that does not know the rank": ([BY_TORCHRUN], (("worker-failed: ",),)),
    # A library's abort prints no rank; the launcher's table then has it.
    "the rank that names a mismatch is not the one that crashed later": (
        [f"[rank0]: {SAID}", CRASHED], (("mismatched-collectives on rank 0: ",), ("crashed on rank 1: ",)),
    ),
    "a mismatch that no rank names": (
        [SAID, CRASHED], (("mismatched-collectives on rank 1: ",), ("crashed on rank 1: ",)),
    ),
    # torchrun's files have the same names in every rank's directory.
    "a rank is known by its file": (
        {"attempt_0/0/stderr.log": ["waiting"], "attempt_0/1/stderr.log": [FULL]}, (("disk-full on rank 1: ",),),
    ),
    "of two ranks' files one has nothing to say": (
        {"attempt_0/0/stderr.log": [], "attempt_0/1/stderr.log": [TIMED_OUT]},
        (("collective-timeout on rank 1: ", "rank 0 did not come to ALLREDUCE number 12\n"),),
    ),
    "one rank's file": (
        {"attempt_0/1/stderr.log": [TIMED_OUT]}, (("collective-timeout on rank 1: ", "!did not come"),),
    ),
    "a rank is known by its only line, the first": (
        ["[rank0]: waiting", f"[rank1]: {TIMED_OUT}"],
        (("collective-timeout on rank 1: ", "rank 0 did not come to ALLREDUCE number 12\n"),),
    ),
    "files of every suffix": (
        {f"log{suffix}": [f"[rank{rank}]: {FULL}"] for rank, suffix in enumerate((".log", ".txt", ".out", ".err"))},
        (("disk-full on rank 0, 1, 2, 3: ", "!and no other"),),
    ),
    "a file that is no log": ({"all.log": [], "notes.md": [FULL]}, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_of_two_of_anything_the_right_one_is_told(name: str, tmp_path: Path) -> None:
    files, expected = CASES[name]
    say(read(tmp_path, files), *expected)


NAMES = {
    "rank3.log": {3}, "logs/rank_12.txt": {12}, "attempt_0/5/stderr.log": {5}, "attempt_0/0/stdout.log": {0},
    "node-4.log": set(), "5.log": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_rank_of_a_log_that_only_its_name_tells(name: str, tmp_path: Path) -> None:
    """It counts among the ranks that there are, whatever the log says or does not say; a line's own mark goes first."""
    path, named = tmp_path / name, NAMES[name]
    said = {
        "": named, "waiting\nrank 7: still\n": {7, *named}, FULL: named, "[rank7]: waiting": {7},
        "[rank7]: waiting\nFetching 3 files": {7, *named}, f"[Rank 9] {TIMED_OUT}": named or {9},
    }  # fmt: skip
    for text, ranks in said.items():
        scan = Scan()
        scan.read(file_with(path, text))
        assert scan.ranks == ranks, text


@pytest.mark.parametrize(("mark", "after"), [("[rank0]: ", " after step 7"), ("[rank1]: ", " after step 5"), ("", "")])
@pytest.mark.parametrize("between", [0, 60_000])
def test_the_step_is_that_of_the_rank_that_failed(mark: str, after: str, between: int, tmp_path: Path) -> None:
    """Rank 0 is two steps ahead; its line is the nearer one. With ``between``, the steps stand in a piece of the log
    that was read before."""
    filler = ["nothing to see here"] * between
    (cause,) = read(tmp_path, ["[rank1]: step 5/9 loss 2.0", "[rank0]: step 7/9 loss 2.0", *filler, f"{mark}{FULL}"])
    assert str(cause).startswith(f"disk-full{mark and f' on rank {mark[5]}'}{after}: ")


def test_metrics_beside_a_log_are_read_and_those_of_another_run_are_not(tmp_path: Path) -> None:
    both = {"a/run.log": ["healthy"], "b/run.log": ["healthy"]}
    read(tmp_path, both | {"a/metrics.jsonl": steps_of(1, 1), "b/metrics.jsonl": steps_of(1, 2)})
    say(diagnose([tmp_path / "a" / "run.log"]), ("two-runs at step 1: two runs wrote into a at once",))
    assert diagnose([tmp_path / "b" / "run.log"]) == ()
    assert metrics_files([tmp_path / "b", tmp_path / "a" / "run.log", tmp_path, tmp_path / "a" / "metrics.jsonl"]) == [
        tmp_path / "a" / "metrics.jsonl", tmp_path / "b" / "metrics.jsonl"
    ]  # fmt: skip


@pytest.mark.parametrize(("recompute", "stage"), [("none", 0), ("full", 3)])
def test_memory_is_compared_with_the_stage_that_needs_most(
    recompute: Literal["none", "full"], stage: int, tmp_path: Path
) -> None:
    """The first stage holds the most activations, the last the logits."""
    plan = kit.plan("llama-3.1-8b", "8xH100", pins=kit.Pins(engine="megatron", pp=4, tp=1, recompute=recompute))
    peaks = [each.peak_gib for each in plan.predicted.memory]
    assert peaks.index(max(peaks)) == stage
    largest = sorted(plan.predicted.memory[stage].components_gib.items(), key=lambda item: item[1])[-3:]
    parts = ", ".join(f"{name} {gib:.1f}" for name, gib in reversed(largest))
    said = f"the plan predicted a peak of {peaks[stage]:.1f} of {plan.cluster.gpu.memory_gib:.1f} GiB ({parts})\n"
    say(read(tmp_path, [OOM], plan), ("gpu-out-of-memory: ", said))
