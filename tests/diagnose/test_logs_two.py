"""The doctor with two of anything: ranks, nodes, steps, groups, runs. Most tests read two inputs that differ in one
thing, so that an answer for the wrong one of them is seen."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Literal

import pytest

import kit
from kit.diagnose.logs import Cause, diagnose

OOM = "torch.OutOfMemoryError: CUDA out of memory."
FULL = "OSError: [Errno 28] No space left on device"


def read(tmp_path: Path, *lines: str) -> tuple[Cause, ...]:
    (tmp_path / "all.log").write_text("\n".join([*lines, ""]))
    return diagnose([tmp_path / "all.log"])


def trace(error: str, mark: str = "", function: str = "main") -> list[str]:
    lines = ["Traceback (most recent call last):", f'  File "/t.py", line 4, in {function}', "    work()", error]
    return [f"{mark}{line}" for line in lines]


# Flight records: (group, number, call, sizes, when, type)
Call = tuple[str, int, str, list[int], int, str]


def records(directory: Path, calls: dict[int, list[Call]], groups: dict[str, str] | None = None) -> Path:
    directory.mkdir()
    for rank, made in calls.items():
        entries = [
            {
                "process_group": (group, "undefined"),
                "collective_seq_id": number,
                "profiling_name": f"nccl:{name}",
                "input_sizes": [sizes],
                "input_dtypes": [dtype],
                "time_created_ns": created,
                "is_p2p": False,
            }
            for group, number, name, sizes, created, dtype in made
        ]
        config = {name: {"ranks": ranks} for name, ranks in (groups or {}).items()}
        record = {"version": "2.10", "pg_config": config, "entries": entries}
        (directory / f"rank_{rank}").write_bytes(pickle.dumps(record))
    return directory


def reduce(number: int, group: str = "0", at: int | None = None, dtype: str = "Float") -> Call:
    return group, number, "all_reduce", [8], number if at is None else at, dtype


def test_of_ranks_that_stopped_at_three_places_the_earliest_is_missing(tmp_path: Path) -> None:
    calls = {rank: [reduce(number) for number in range(1, last + 1)] for rank, last in ((0, 3), (1, 2), (2, 1))}
    (cause,) = diagnose([records(tmp_path / "flight", calls)])
    assert cause.ranks == (0, 1)
    assert "rank 2 did not come to all_reduce number 2 of group 0" in cause.meaning


def test_the_record_that_is_named_has_the_call(tmp_path: Path) -> None:
    calls = {0: [reduce(1)], 1: [reduce(1), reduce(2)], 2: [reduce(1), reduce(2)]}
    (cause,) = diagnose([records(tmp_path / "flight", calls)])
    assert (cause.ranks, cause.place) == ((1, 2), "rank_1")


def test_a_rank_without_a_call_in_the_group_of_all_is_missing_there(tmp_path: Path) -> None:
    calls = {0: [reduce(1)], 1: [reduce(1)], 2: [("1", 1, "all_gather", [4], 1, "Float")]}
    (cause,) = diagnose([records(tmp_path / "flight", calls)])
    assert "rank 2 did not come to all_reduce number 1 of group 0" in cause.meaning


def test_ranks_whose_records_are_not_here_are_not_missing(tmp_path: Path) -> None:
    calls = {rank: [reduce(1, "5"), reduce(2, "5")] for rank in (0, 1)}
    assert diagnose([records(tmp_path / "flight", calls, {"5": "[0, 1, 2, 3]"})]) == ()


def test_calls_of_two_types_differ(tmp_path: Path) -> None:
    calls = {rank: [reduce(1, dtype="BFloat16" if rank == 2 else "Float")] for rank in range(3)}
    (cause,) = diagnose([records(tmp_path / "flight", calls)])
    assert (cause.cause, cause.ranks) == ("mismatched-collectives", (2,))
    assert "rank 2 called all_reduce of [[8]] BFloat16" in cause.meaning


def test_a_call_that_one_record_has_forgotten_is_compared_among_the_others(tmp_path: Path) -> None:
    """Rank 0 made many calls in other groups, and its ring buffer holds its last ones only."""
    other = ("0", 3, "broadcast", [4], 3, "Float")
    calls = {0: [reduce(4)], 1: [reduce(3), reduce(4)], 2: [other, reduce(4)], 3: [reduce(3), reduce(4)]}
    (cause,) = diagnose([records(tmp_path / "flight", calls)])
    assert (cause.cause, cause.ranks) == ("mismatched-collectives", (2,))


def test_of_two_groups_the_one_whose_call_was_issued_first_parted_first(tmp_path: Path) -> None:
    """In group A the call was issued at 10 and by its last rank at 100; in B at 50 and 60."""
    calls = {
        0: [reduce(1, "A", 1), reduce(2, "A", 10), reduce(1, "B", 2), reduce(2, "B", 50)],
        1: [reduce(1, "A", 1), reduce(2, "A", 100), reduce(1, "B", 2), reduce(2, "B", 60)],
        2: [reduce(1, "A", 1), reduce(1, "B", 2)],
    }
    (cause,) = diagnose([records(tmp_path / "flight", calls)])
    assert "number 2 of group A" in cause.meaning


def test_two_slow_ranks_of_five_are_both_named(tmp_path: Path) -> None:
    times = {0: 1.0, 1: 1.0, 2: 1.2, 3: 3.0, 4: 4.0}
    lines = [f"[rank{rank}] step {i} loss 1.0 work_time_s {each}" for i in range(9) for rank, each in times.items()]
    (cause,) = read(tmp_path, *lines)
    assert (cause.cause, cause.ranks) == ("slow-rank", (3, 4))


def losses(rank: int, values: list[float]) -> list[str]:
    return [f"[rank{rank}] step {step} loss {value}" for step, value in enumerate(values, start=1)]


def alternating(*ranks: list[str]) -> list[str]:
    return [line for lines in zip(*ranks, strict=True) for line in lines]


FALLS = [6.0, 5.0, 4.0, 3.5, 3.2, 3.1, 3.0]


def test_of_two_ranks_that_diverge_the_first_step_is_told(tmp_path: Path) -> None:
    late, early = losses(0, [*FALLS, 3.0, 3.0, *[9.0] * 5]), losses(1, [*FALLS, *[9.0] * 7])
    (cause,) = read(tmp_path, *alternating(late, early))
    assert (cause.cause, cause.ranks, cause.step) == ("loss-divergence", (0, 1), 8)
    assert cause.evidence.startswith("[rank1] step 8")
    well = losses(0, [*FALLS, *[2.9] * 7])
    (cause,) = read(tmp_path, *alternating(well, early))
    assert (cause.ranks, cause.step) == ((1,), 8)


@pytest.mark.parametrize("line", ["[rank{0}] step {1} loss {2}", "[rank{0}] {{'loss': {2}, 'epoch': 0.{1}}}"])
def test_of_two_ranks_the_one_whose_loss_fell_to_zero(line: str, tmp_path: Path) -> None:
    values = {0: [2.5, 2.4, 2.2, 2.1, 2.0, 1.9], 1: [2.5, 2.4, 2.2, 0.0, 0.0, 0.0]}
    lines = [line.format(rank, step + 1, values[rank][step]) for step in range(6) for rank in (1, 0)]
    assert [(cause.cause, cause.ranks) for cause in read(tmp_path, *lines)] == [("loss-zero", (1,))]


@pytest.mark.parametrize(("rank", "step"), [(0, 7), (1, 5), (None, None)])
@pytest.mark.parametrize("between", [0, 60_000])
def test_the_step_is_that_of_the_rank_that_failed(
    rank: int | None, step: int | None, between: int, tmp_path: Path
) -> None:
    """Rank 0 is two steps ahead; its line is the nearer one. With ``between``, the steps stand in a piece of the log
    that was read before."""
    mark = "" if rank is None else f"[rank{rank}]: "
    filler = ["nothing to see here"] * between
    (cause,) = read(tmp_path, "[rank1]: step 5/9 loss 2.0", "[rank0]: step 7/9 loss 2.0", *filler, f"{mark}{FULL}")
    assert (cause.cause, cause.step) == ("disk-full", step)


def test_a_step_in_the_line_itself_is_the_step(tmp_path: Path) -> None:
    (cause,) = read(tmp_path, "[rank1]: step 5 loss 2.0", f"[rank1]: saving at step 6: {FULL}")
    assert (cause.step, cause.when) == (6, "at step 6")


def test_two_ranks_with_one_cause_are_one_finding_of_the_first_step(tmp_path: Path) -> None:
    later, first = ["[rank3]: step 9", f"[rank3]: {OOM}"], ["[rank1]: step 4", f"[rank1]: {OOM}"]
    (cause,) = read(tmp_path, *later, *first)
    assert (cause.ranks, cause.step, cause.place) == ((1, 3), 4, "all.log:2")
    assert "and no other" not in cause.meaning
    (cause,) = read(tmp_path, *first)
    assert (cause.ranks, "and no other" in cause.meaning) == ((1,), False)
    (cause,) = read(tmp_path, *first, "[rank3]: step 9")
    assert "and no other" in cause.meaning


def test_two_phases_of_one_act_are_both_told(tmp_path: Path) -> None:
    forward = trace(OOM, "[rank0]: ", "forward")
    backward = trace(OOM, "[rank1]: ", "backward")
    (cause,) = read(tmp_path, *forward, *backward)
    assert (cause.ranks, cause.phase) == ((0, 1), "forward and backward")


def test_a_process_that_the_launcher_killed_is_not_the_one_that_was_killed(tmp_path: Path) -> None:
    by_launcher = "W Unable to shutdown process 11 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL"
    table = (
        "  rank      : {0} (local_rank: {0})\n  exitcode  : -9\n  traceback : Signal 9 (SIGKILL) received by PID {1}"
    )
    (cause,) = read(tmp_path, by_launcher, table.format(0, 11), table.format(1, 12))
    assert (cause.cause, cause.ranks) == ("killed", (1,))


def test_many_lines_of_one_rank_do_not_hide_another(tmp_path: Path) -> None:
    (cause,) = read(tmp_path, *[f"[rank0]: {OOM}"] * 300, f"[rank1]: {OOM}")
    assert cause.ranks == (0, 1)
    flood = [line for _ in range(300) for line in trace("KeyError: 'labels'", "[rank0]: ")]
    causes = read(tmp_path, *flood, *trace("ValueError: no labels", "[rank1]: "))
    assert [cause.meaning for cause in causes] == ["KeyError: 'labels'", "ValueError: no labels"]


CHAIN = "During handling of the above exception, another exception occurred:"


def test_an_exception_that_another_rank_handled_is_not_this_ranks(tmp_path: Path) -> None:
    one, two = "[rank0]: ", "[rank1]: "
    lines = [*trace("OSError: busy", two), *trace("KeyError: 'a'", one), f"{two}", f"{two}{CHAIN}", f"{two}"]
    causes = read(tmp_path, *lines, *trace("ValueError: b", two))
    assert [(cause.meaning, cause.ranks) for cause in causes] == [("KeyError: 'a'", (0,)), ("ValueError: b", (1,))]


def test_one_exception_at_two_places_is_two(tmp_path: Path) -> None:
    causes = read(
        tmp_path, *trace("KeyError: 'a'", "[rank0]: ", "load"), *trace("KeyError: 'a'", "[rank1]: ", "collate")
    )
    assert [(cause.ranks, cause.frames) for cause in causes] == [
        ((0,), "/t.py:4 in load"),
        ((1,), "/t.py:4 in collate"),
    ]


TABLE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_17:16:0{second}
  host      : node-{node}
  rank      : {rank} (local_rank: {local})
  exitcode  : 1 (pid: 3954)
"""


@pytest.mark.parametrize(("first", "second", "rank"), [(1, 3, 3), (3, 1, 11)])
def test_of_two_nodes_tables_the_earlier_time_is_the_first_failure(
    first: int, second: int, rank: int, tmp_path: Path
) -> None:
    (tmp_path / "node-0.log").write_text(TABLE.format(second=first, node=0, rank=3, local=3))
    (tmp_path / "node-1.log").write_text(TABLE.format(second=second, node=1, rank=11, local=3))
    (cause,) = diagnose([tmp_path])
    assert (cause.cause, cause.ranks) == ("worker-failed", (rank,))
    assert f"on node-{int(rank > 8)}" in cause.meaning


def test_a_table_is_no_word_about_two_errors_without_a_rank(tmp_path: Path) -> None:
    two = [*trace("KeyError: 'a'"), *trace("ValueError: b")]
    table = TABLE.format(second=1, node=0, rank=3, local=3).splitlines()
    assert [cause.ranks for cause in read(tmp_path, *two, *table)] == [(), ()]
    assert [cause.ranks for cause in read(tmp_path, *trace("KeyError: 'a'"), *table)] == [(3,)]


TIMED_OUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=1800000)"


@pytest.mark.parametrize(("rank", "blamed"), [(0, False), (1, True)])
def test_only_the_download_of_the_rank_that_did_not_come_kept_the_others(
    rank: int, blamed: bool, tmp_path: Path
) -> None:
    (cause,) = read(tmp_path, f"[rank{rank}]: Downloading shards: 12%", "[rank1]: step 2", f"[rank0]: {TIMED_OUT}")
    assert ("downloaded" in cause.meaning) is blamed
    assert "rank 1" in cause.meaning


def test_ranks_that_a_flight_record_names_are_those_that_came(tmp_path: Path) -> None:
    calls = {0: [reduce(1), reduce(2)], 1: [reduce(1), reduce(2)], 2: [reduce(1)]}
    directory = records(tmp_path / "flight", calls)
    (tmp_path / "all.log").write_text(f"[rank2]: step 2\n[rank0]: {TIMED_OUT}\n")
    (cause,) = diagnose([tmp_path / "all.log", directory])
    assert cause.ranks == (0, 1)
    assert cause.meaning.endswith("rank 2 did not come to all_reduce number 2 of group 0, sizes [[8]]")


def metrics(path: Path, rows: list[dict[str, float]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def experts(dead: list[int], load: list[float]) -> list[dict[str, float]]:
    rows = zip(range(1, len(dead) + 1), dead, load, strict=True)
    return [{"step": step, "expert_load_max": most, "dead_experts": idle} for step, idle, most in rows]


@pytest.mark.parametrize(
    ("dead", "load", "expected"),
    [
        ([2] * 20, [2.0] * 20, ["dead-experts"]),
        ([2] * 19 + [0], [2.0] * 20, []),  # an expert that came back
        ([0] * 19 + [2], [2.0] * 20, []),  # and one that idles for a step
        ([0] * 20, [2.0] * 19 + [9.0], []),
        ([0] * 20, [2.0] * 9 + [9.0] * 11, ["hot-expert"]),
    ],
)
def test_one_step_of_twenty_says_nothing_of_experts(
    dead: list[int], load: list[float], expected: list[str], tmp_path: Path
) -> None:
    causes = diagnose([metrics(tmp_path / "metrics.jsonl", experts(dead, load))])
    assert [cause.cause for cause in causes] == expected


def test_the_fewest_dead_experts_are_told_and_the_median_load(tmp_path: Path) -> None:
    path = metrics(tmp_path / "metrics.jsonl", experts([3, 2] * 10, [4.0, 6.0] * 9 + [5.0, 99.0]))
    dead, hot = diagnose([path])
    assert dead.meaning.startswith("2 or more experts")
    assert "5.5 times the mean" in hot.meaning  # nine of 4, one 5; nine of 6, one 99


@pytest.mark.parametrize(
    ("steps", "again", "first", "reached", "line"),
    [
        ([1, 1, 2, 2, 3, 3], 3, 1, 1, 2),  # two runs in step with each other
        ([1, 2, 3, 2, 3, 4], 2, 2, 4, 4),
        ([1, 2, 3, 4], 0, None, 4, None),
    ],
)
def test_steps_of_two_runs_are_counted(
    steps: list[int], again: int, first: int | None, reached: int, line: int | None, tmp_path: Path
) -> None:
    path = metrics(tmp_path / "metrics.jsonl", [{"step": step, "loss": 3.0} for step in steps])
    causes = diagnose([path])
    assert len(causes) == bool(again)
    for cause in causes:
        assert (cause.cause, cause.step, cause.place) == ("two-runs", first, f"{path}:{line}")
        assert f"{again} steps stand in metrics.jsonl again, from step {first} on" in cause.meaning


def test_metrics_beside_a_log_are_read_and_those_of_another_run_are_not(tmp_path: Path) -> None:
    for run, step in (("a", 1), ("b", 2)):
        (tmp_path / run).mkdir()
        (tmp_path / run / "run.log").write_text("healthy\n")
        metrics(tmp_path / run / "metrics.jsonl", [{"step": 1}, {"step": step}])
    assert [cause.cause for cause in diagnose([tmp_path / "a" / "run.log"])] == ["two-runs"]
    assert diagnose([tmp_path / "b" / "run.log"]) == ()


def event(rank: int, step: int, what: str = "slow rank") -> str:
    return json.dumps({"event": what, "rank": rank, "host": f"node-{rank}", "step": step, "ratio": 1.8})


def test_of_two_slow_ranks_in_turn_the_last_is_named(tmp_path: Path) -> None:
    metrics(tmp_path / "metrics.jsonl", [{"step": 1}])
    (tmp_path / "events.jsonl").write_text("\n".join([event(3, 10), event(5, 20), ""]))
    (cause,) = diagnose([tmp_path])
    assert (cause.ranks, cause.step) == ((5,), 20)
    assert "rank 5 on node-5 works 1.8 times as long" in cause.meaning


@pytest.mark.parametrize(("recompute", "stage"), [("none", 0), ("full", 3)])
def test_memory_is_compared_with_the_stage_that_needs_most(
    recompute: Literal["none", "full"], stage: int, tmp_path: Path
) -> None:
    """The first stage holds the most activations, the last the logits."""
    pins = kit.Pins(engine="megatron", pp=4, tp=1, recompute=recompute)
    plan = kit.plan("llama-3.1-8b", "8xH100", pins=pins)
    peaks = [each.peak_gib for each in plan.predicted.memory]
    assert peaks.index(max(peaks)) == stage
    (tmp_path / "all.log").write_text(f"{OOM}\n")
    assert f"predicted a peak of {peaks[stage]:.1f} of" in diagnose([tmp_path / "all.log"], plan)[0].meaning


def test_a_rank_is_known_by_its_file_or_its_only_line(tmp_path: Path) -> None:
    """Two ranks' files, of which one has nothing to say; the same with one file."""
    for rank, text in ((0, ""), (1, f"{TIMED_OUT}\n")):
        path = tmp_path / "attempt_0" / str(rank) / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (cause,) = diagnose([tmp_path])
    assert cause.meaning.endswith("rank 0 did not come to ALLREDUCE number 12")
    (cause,) = diagnose([tmp_path / "attempt_0" / "1" / "stderr.log"])
    assert "did not come" not in cause.meaning
    (cause,) = read(tmp_path, "[rank0]: waiting", f"[rank1]: {TIMED_OUT}")
    assert cause.meaning.endswith("rank 0 did not come to ALLREDUCE number 12")


def test_of_two_launchers_the_one_that_knows_the_rank(tmp_path: Path) -> None:
    """torchrun counts on its node; srun counts in the job."""
    torchrun = "E1126 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 22958) of binary: python"
    (cause,) = read(tmp_path, torchrun, "srun: error: node-2: task 11: Exited with exit code 1")
    assert (cause.cause, cause.ranks, cause.place) == ("worker-failed", (11,), "all.log:2")
    (cause,) = read(tmp_path, torchrun)
    assert cause.ranks == ()


def test_the_rank_that_names_a_mismatch_is_not_the_one_that_crashed_later(tmp_path: Path) -> None:
    """A library's abort prints no rank; the launcher's table then has it."""
    said = "RuntimeError: Detected mismatch between collectives on ranks."
    crashed = "  rank      : 1 (local_rank: 1)\n  exitcode  : -6\n  traceback : Signal 6 (SIGABRT) received by PID 12"
    assert read(tmp_path, f"[rank0]: {said}", crashed)[0].ranks == (0,)
    assert read(tmp_path, said, crashed)[0].ranks == (1,)
