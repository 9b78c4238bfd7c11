"""The doctor's reading of logs: of failures provoked here (tests/diagnose/logs, made by
tests.system.failures), and of
messages that need a GPU or a fabric, as the sources of torch, NCCL and DeepSpeed print them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import kit
from kit.diagnose.logs import diagnose, flight_recorder
from kit.errors import SpecError
from tests.system.failures.__main__ import FAILURES, Failure, found, plan_of, provoke

ROOT = Path(__file__).parents[2]
LOGS = Path(__file__).parent / "logs"


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_provoked_failure(failure: Failure) -> None:
    files = [LOGS / f"{failure.name}.log", *sorted((LOGS / f"{failure.name}-flight").glob("flight_*"))]
    causes = diagnose(files, plan_of(failure))
    assert found(failure, causes), [str(cause) for cause in causes]


def test_a_rank_that_may_not_start_threads_and_what_its_launcher_then_kills() -> None:
    """A run of kit's whose rank 1 had no room for a thread; torchrun killed rank 0, which only waited."""
    causes = diagnose([LOGS / "threads.log"])
    assert [(cause.cause, cause.ranks) for cause in causes] == [("thread-limit", (1,))]


def test_a_spike_that_goes_back_is_no_divergence(tmp_path: Path) -> None:
    losses = [6.0, 5.0, 4.0, 3.5, 3.2, 3.1, 3.0, 9.0, 8.0, 4.0, 3.1, 3.0, 3.0, 2.9, 3.0]
    log = tmp_path / "run.log"
    log.write_text("".join(f"step {step}/15  loss {loss}\n" for step, loss in enumerate(losses, start=1)))
    assert diagnose([log]) == ()
    log.write_text(
        "".join(f"step {step}/12  loss {loss}\n" for step, loss in enumerate(losses[:7] + [9.0] * 5, start=1))
    )
    (cause,) = diagnose([log])
    assert (cause.cause, cause.step) == ("loss-divergence", 8)


TIMED_OUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=1800000)"


@pytest.mark.parametrize(
    "line", ["step {i}/40  loss {loss}", "{{'loss': {loss}, 'epoch': 0.{i}}}", "iteration {i}/ 40 | lm loss: {loss} |"]
)
@pytest.mark.parametrize(
    ("losses", "zero"),
    [
        ([2.5, 2.4, 2.2, 0.0, 0.0, 0.0], True),
        ([2.5, 2.4, 2.2, 0.0, 0.0], False),
        ([2.5, 0.4, 0.05, 0.0, 0.0, 0.0], False),  # it has learned its few samples by heart
        ([2.5, 0.0, 0.0, 0.0, 2.4, 2.3], False),
        ([0.0] * 9, False),
    ],
)
def test_a_loss_that_falls_to_zero_comes_before_the_time_out_that_follows(line, losses, zero, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    text = "".join(line.format(i=i, loss=loss) + "\n" for i, loss in enumerate(losses, start=1))
    log.write_text(text)
    assert [cause.cause for cause in diagnose([log])] == ["loss-zero"] * zero
    log.write_text(text + TIMED_OUT + "\n")
    assert [cause.cause for cause in diagnose([log])] == ["loss-zero"] * zero + ["collective-timeout"]
    if zero and line.startswith("step"):
        assert diagnose([log])[0].step == 4


@pytest.mark.parametrize(
    ("load", "dead", "steps", "expected"),
    [
        (1.3, 0, 40, []),
        (3.5, 0, 40, ["hot-expert"]),
        (2.0, 2, 40, ["dead-experts"]),
        (6.0, 1, 40, ["dead-experts", "hot-expert"]),
        (6.0, 1, 19, []),  # a router is uneven when it starts
    ],
)
def test_experts_without_tokens_or_with_too_many(
    tmp_path: Path, load: float, dead: int, steps: int, expected: list[str]
) -> None:
    rows = [{"step": step, "loss": 3.0, "expert_load_max": load, "dead_experts": dead} for step in range(1, steps + 1)]
    rows[0] |= {"expert_load_max": 8.0, "dead_experts": 3}
    lines = [json.dumps(row) for row in rows] + ['{"step": 41, "expert_load_max": nu']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    causes = diagnose([tmp_path])
    assert [cause.cause for cause in causes] == expected
    assert all(cause.step == steps for cause in causes)


STEP = b'{"step": 1, "loss": 3.0}\n'


@pytest.mark.parametrize(
    ("written", "line", "said"),
    [
        (b"garbage", 1, "line 1 is no JSON object: "),
        (STEP + b"\x00\xff\x1b[2J\n[1]\n\n5\n", 2, "line 2 is no JSON object, the first of 3 such lines: "),
        (STEP + b'{"step": 2, "lo\n', 2, "line 2 is no JSON object: "),  # a half line with others after it
        (b"[" * 200_000 + b"\n" + STEP, 1, "line 1 is no JSON object: "),
        (b'{"a":' * 10_000 + b"\n", 1, "line 1 is no JSON object: "),
        (STEP + b'{"step": 2, "lo', None, ""),  # a run that was killed
        (STEP + b'{"other": NaN}\n\n{"long": "' + b"x" * 200_000 + b'"}\n', None, ""),
        (b"", None, ""),
    ],
    ids=["garbage", "bytes", "half", "long", "deep", "killed", "another's", "empty"],
)
def test_a_line_of_the_metrics_that_is_no_json_is_told(
    tmp_path: Path, written: bytes, line: int | None, said: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(written)
    for given in (path, tmp_path):
        causes = [cause for cause in diagnose([given]) if cause.cause == "no-json"]
        assert [cause.place for cause in causes] == ([] if line is None else [f"{path}:{line}"])
        assert all(said in cause.meaning and cause.evidence.isprintable() for cause in causes)


def test_a_failure_provoked_now(tmp_path: Path) -> None:
    killed = next(failure for failure in FAILURES if failure.name == "killed")
    causes = provoke(killed, tmp_path / "killed")
    assert found(killed, causes), [str(cause) for cause in causes]


def test_a_clean_log_has_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("".join(f"step {i}/60  loss 5.6 norm 1.2  tokens/s 1,000  peak 3.1 GiB\n" for i in range(60)))
    assert diagnose([log]) == ()


MESSAGES = (
    (
        '[rank3]: Traceback (most recent call last):\n[rank3]:   File "train.py", line 9, in main\n'
        "[rank3]:     loss.backward()\n[rank3]: torch.OutOfMemoryError: CUDA out of memory.\n"
        "[rank0]: step 7\n",
        "gpu-out-of-memory",
        (3,),
        "no other",
    ),
    (
        "[rank0]:[E1120] ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=1) ran for 600000 milliseconds before timing out.\n"
        "[rank1]: validation starts\n",
        "collective-timeout",
        (0,),
        "rank 1 did not come",
    ),
    ("node-3: ncclInternal NET/Plugin: No plugin found (libnccl-net.so)\n", "slow-network", (), "plain TCP"),
    ("srun: error: Node failure on node-7\n", "dead-node", (), "went away"),
    ("error: rank 3 hangs: step 12 has taken 900 s (run.limits.hang_seconds); start again\n", "hung", (), "watchdog"),
    ("NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n", "gpu-fault", (), "fallen off the PCIe bus"),
    ("RuntimeError: Error building extension 'async_io'\n", "missing-op", (), "missing"),
    ("deepspeed.runtime.config.DeepSpeedConfigError: x\n", "config", (), "refused"),
    ("E socket.cpp: The server socket has failed to bind. EADDRINUSE\n", "port-in-use", (), "taken"),
    ("node-2: Host key verification failed.\n", "ssh", (), "log in"),
    (
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory.\n",
        "shared-memory",
        (),
        "/dev/shm",
    ),
    (
        "AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 2\n",
        "gradient-partition-no-sync",
        (),
        "no_sync",
    ),
    ("ValueError: Attempting to unscale FP16 gradients.\n", "fp16-weights", (), "fp16 weights"),
    ("[rank1]: RuntimeError: 'weight' must be 2-D\n", "sharded-weight", (1,), "sharded"),
    (
        "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 but "
        "the current world size is 16.\n",
        "checkpoint-world-size",
        (),
        "another number",
    ),
    ("NotImplementedError: Cannot copy out of meta tensor; no data!\n", "meta-tensor", (), "meta device"),
    (
        "megatron.core.dist_checkpointing.core.CheckpointingException: Global shape mismatch for loaded "
        "(torch.Size([128256, 64])) and expected ((128512, 64)) tensor for key embedding.word_embeddings.weight\n",
        "checkpoint-shape",
        (),
        "another shape",
    ),
    (
        "node-3:81:97 [2] NCCL WARN NET/IB : Got completion from peer 10.0.0.4<44219> with status=12 opcode=0 len=0 "
        "vendor err 129 (Recv) localGid ::\n",
        "fabric-error",
        (),
        "link",
    ),
    (
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url x\n",
        "credentials",
        (),
        "token",
    ),
    ("Exception: Current loss scale already at minimum - cannot decrease scale anymore.\n", "loss-scale", (), "fp16"),
)


@pytest.mark.parametrize(("text", "cause", "ranks", "says"), MESSAGES, ids=[row[1] for row in MESSAGES])
def test_messages_that_a_cpu_cannot_provoke(
    text: str, cause: str, ranks: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / "all.log").write_text(text)
    first = diagnose([tmp_path / "all.log"])[0]
    assert first.cause == cause
    assert first.ranks == ranks
    assert says in first.meaning


def test_the_phase_of_an_out_of_memory_comes_from_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "all.log").write_text(MESSAGES[0][0])
    assert diagnose([tmp_path / "all.log"])[0].phase == "backward"


def test_an_out_of_memory_is_told_beside_the_plan(tmp_path: Path) -> None:
    plan = kit.plan("llama-3.1-8b", "8xH100", pins=kit.Pins(engine="deepspeed", zero_stage=3))
    log = tmp_path / "all.log"
    log.write_text(
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 3 has a total capacity of "
        "79.11 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use.\n"
    )
    meaning = diagnose([log], plan)[0].meaning
    assert f"predicted a peak of {plan.predicted.peak_gib:.1f}" in meaning
    assert f"{78.0 / plan.predicted.peak_gib:.2f} times that" in meaning
    assert "predicted" not in diagnose([log])[0].meaning


def flight_records(directory: Path, calls: dict[int, list[tuple[str, list[int]]]]) -> Path:
    """Records of these ranks, in the recorder's own form; the k-th call of a rank is number k of the default group."""
    directory.mkdir()
    for rank, made in calls.items():
        entries = [
            {
                "process_group": ("0", "default_pg"),
                "collective_seq_id": number,
                "profiling_name": f"nccl:{name}",
                "input_sizes": [sizes],
                "input_dtypes": ["Float"],
                "time_created_ns": 1000 + number,
                "is_p2p": False,
            }
            for number, (name, sizes) in enumerate(made, start=1)
        ]
        (directory / f"rank_{rank}").write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": entries}))
    return directory


def test_flight_records_say_who_parted_where(tmp_path: Path) -> None:
    both = [("all_reduce", [8]), ("all_reduce", [8])]
    behind = diagnose([flight_records(tmp_path / "a", {0: both, 1: both, 2: both[:1]})])[0]
    assert "rank 2 did not come to all_reduce number 2 of group 0 (default_pg), sizes [[8]]" in behind.meaning
    odd = flight_records(tmp_path / "b", {0: both, 1: both, 2: [both[0], ("all_gather", [4])]})
    differs = diagnose([odd])[0]
    assert (differs.cause, differs.ranks) == ("mismatched-collectives", (2,))
    assert "rank 2 called all_gather of [[4]]" in differs.meaning
    assert diagnose([flight_records(tmp_path / "c", {0: both, 1: both})]) == ()


def test_the_first_parting_of_several_groups_is_the_cause(tmp_path: Path) -> None:
    """Ranks 0 and 1 part in their own group first; what rank 2 then meets in the group of all is a consequence."""
    directory = tmp_path / "groups"
    directory.mkdir()
    calls = {
        0: [
            ("0", "default_pg", 1, "all_reduce", 10),
            ("1", "tp", 1, "all_gather", 20),
            ("0", "default_pg", 2, "barrier", 90),
        ],
        1: [
            ("0", "default_pg", 1, "all_reduce", 11),
            ("1", "tp", 1, "broadcast", 21),
            ("0", "default_pg", 2, "barrier", 91),
        ],
        2: [("0", "default_pg", 1, "all_reduce", 12), ("0", "default_pg", 2, "all_reduce", 80)],
    }
    for rank, made in calls.items():
        entries = [
            {
                "process_group": (group, described),
                "collective_seq_id": number,
                "profiling_name": f"nccl:{name}",
                "input_sizes": [[8]],
                "input_dtypes": ["Float"],
                "time_created_ns": created,
                "is_p2p": False,
            }
            for group, described, number, name, created in made
        ]
        groups = {"1": {"ranks": "[0, 1]"}, "0": {"ranks": "[0, 1, 2]"}}
        record = {"version": "2.10", "pg_config": groups, "entries": entries}
        (directory / f"rank_{rank}").write_bytes(pickle.dumps(record))
    cause = diagnose([directory])[0]
    assert cause.cause == "mismatched-collectives"
    assert "number 1 of group 1 (tp)" in cause.meaning


def test_a_rank_of_two_that_takes_twice_as_long_is_slow(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("".join(f"[rank{r}] step {i} loss 1.0 work_time_s {1.0 + r}\n" for i in range(9) for r in (0, 1)))
    assert [(cause.cause, cause.ranks) for cause in diagnose([log])] == [("slow-rank", (1,))]


def test_slurms_err_files_in_a_directory_are_read(tmp_path: Path) -> None:
    (tmp_path / "job.err").write_text("OSError: [Errno 28] No space left on device\n")
    assert diagnose([tmp_path])[0].cause == "disk-full"


def test_the_rank_of_a_killed_process_is_not_its_number_on_its_node(tmp_path: Path) -> None:
    """torchrun's summary on the second of two nodes: rank 11 is number 3 there."""
    log = tmp_path / "node-1.log"
    log.write_text(
        "  rank      : 11 (local_rank: 3)\n  exitcode  : -9 (pid: 77)\n  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 77\n"
    )
    assert [(cause.cause, cause.ranks) for cause in diagnose([log])] == [("killed", (11,))]


def test_a_record_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path, (str(tmp_path / "ran"),))

    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [Bad()]}))
    assert flight_recorder.records([tmp_path]) == {}


def test_one_file_a_rank_names_the_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        path = tmp_path / "attempt_0" / str(rank) / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text("OSError: [Errno 28] No space left on device\n" if rank else "waiting\n")
    assert diagnose([tmp_path])[0].ranks == (1,)


def test_the_command_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kit", "doctor", str(LOGS / "disk-full.log"), "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 1
    assert json.loads(run.stdout)[0]["cause"] == "disk-full"
    with pytest.raises(SpecError, match="no such log"):
        diagnose([LOGS / "none.log"])


@pytest.mark.parametrize("other", [None, "model.safetensors"])
def test_a_directory_without_logs_is_an_error_and_no_word_of_health(tmp_path: Path, other: str | None) -> None:
    if other:
        (tmp_path / other).write_bytes(b"{}")
    with pytest.raises(SpecError, match=r"no log \(\.log, .* no metrics\.jsonl and no flight record there; name the"):
        diagnose([tmp_path])
