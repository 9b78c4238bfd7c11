"""The doctor's reading of logs: of failures provoked here (tests/addons/logs, made by tests.system.failures), and of
messages that need a GPU or a fabric, as the sources of torch, NCCL and DeepSpeed print them."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

import kit
from kit.addons.doctor.logs import diagnose, flight_recorder
from kit.errors import SpecError
from tests.addons.written import OOM, TIMED_OUT, read, say
from tests.support.assets import RECIPE
from tests.support.files import file_with, files_in
from tests.support.in_process import kit_main
from tests.support.refusals import refusal
from tests.system.failures.__main__ import FAILURES, Failure, found

LOGS = Path(__file__).parent / "logs"
KIT_RUN = ("layout.engine=torch", "job.global_batch_size=64", "layout.micro_batch_size=32", "run.steps=3")
KEPT = (
    Failure("nan", "NaN in the weights of rank 1 at step 3", "not-a-number", None, step=4),
    Failure("diverges", "a learning rate far too high from step 13", "loss-divergence", None, step=14),
    Failure("slow", "rank 1 sleeps half a second a step", "slow-rank"),
    Failure("data", "the data set ends", "data-exhausted", None),
    Failure("oom-kill", "the kernel kills rank 1, whose cgroup is full", "killed", 1, "out-of-memory killer"),
    Failure("kit-run", "too little memory for rank 1", "host-out-of-memory", 1, "the plan predicted", "forward"),
    Failure("dead-node", "the host of rank 1 goes down, network included", "dead-node", None),
)
"""Provoked once, as their logs tell: what is printed of them is a program's own line, or torchrun's as of ``killed``.
``tests.system.failures`` makes the others anew."""


@pytest.mark.parametrize("failure", [*FAILURES, *KEPT], ids=lambda failure: failure.name)
def test_provoked_failure(failure: Failure) -> None:
    files = [LOGS / f"{failure.name}.log", *sorted((LOGS / f"{failure.name}-flight").glob("flight_*"))]
    of_kit = failure.name == "kit-run"
    causes = diagnose(files, kit.plan(kit.load_recipe(RECIPE, ("cluster=2xcpu", *KIT_RUN))) if of_kit else None)
    assert found(failure, causes), [str(cause) for cause in causes]


def test_a_rank_that_may_not_start_threads_and_what_its_launcher_then_kills() -> None:
    """A run of kit's whose rank 1 had no room for a thread; torchrun killed rank 0, which only waited."""
    say(diagnose([LOGS / "threads.log"]), ("thread-limit on rank 1",))


FALLS = [6.0, 5.0, 4.0, 3.5, 3.2, 3.1, 3.0]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([*FALLS, 9.0, 8.0, 4.0, 3.1, 3.0, 3.0, 2.9, 3.0], ""),  # a spike that goes back
        # The median of five that was lowest, 3.2, and of the last five.
        ([*FALLS, 8.0, 9.0, 9.5, 9.6, 9.7], "step 8: the loss had come down to 3.2, went up, and is 9.5 at the end"),
        ([*FALLS, 8.0, 9.0, 4.7, 9.6, 9.7], ""),  # one of the last five is below one and a half times the level
        ([*FALLS, 4.9, 9.0, 9.5, 9.6, 9.7], "step 8: "),
        ([*FALLS, 4.7, 4.9, 9.0, 9.5, 9.6, 9.7], "step 9: "),
        ([*FALLS, 8.0, 9.0, 9.5, 9.6], ""),  # four
        ([9.0, *FALLS[:4], *[9.0] * 5], "step 6: the loss had come down to 5, "),  # the fewest that have a level
        ([0.0] * 5 + [9.0] * 5, ""),
    ],
)  # fmt: skip
def test_a_loss_that_goes_up_and_stays_there_diverges(losses: list[float], said: str, tmp_path: Path) -> None:
    lines = [f"step {step}/15  loss {loss}" for step, loss in enumerate(losses, start=1)]
    say(read(tmp_path, lines), *([(f"loss-divergence at {said}",)] if said else []))


@pytest.mark.parametrize(
    "line", ["step {i}/40  loss {loss}", "{{'loss': {loss}, 'epoch': 0.{i}}}", "iteration {i}/ 40 | lm loss: {loss} |"]
)
@pytest.mark.parametrize(
    ("losses", "zero"),
    [
        ([2.5, 2.4, 2.2, 0.0, 0.0, 0.0], True),
        ([2.5, 0.0, 2.2, 0.0, 0.0, 0.0], True),
        ([2.5, 2.4, 2.2, 0.0, 0.0], False),
        ([2.5, 0.4, 0.05, 0.0, 0.0, 0.0], False),  # it has learned its few samples by heart
        ([2.5, 0.0, 0.0, 0.0, 2.4, 2.3], False),
        ([0.0] * 9, False),
    ],
)
def test_a_loss_that_falls_to_zero_comes_before_the_time_out_that_follows(
    line: str, losses: list[float], zero: bool, tmp_path: Path
) -> None:
    lines = [line.format(i=i, loss=loss) for i, loss in enumerate(losses, start=1)]
    at = " at step 4" if line.startswith("step") else ""
    expected = [(f"loss-zero{at}: the loss was 2.2 and is exactly 0 since", "all.log:4")] * zero
    say(read(tmp_path, lines), *expected)
    say(read(tmp_path, [*lines, TIMED_OUT]), *expected, ("collective-timeout",))


STEP = b'{"step": 1, "loss": 3.0}\n'


@pytest.mark.parametrize(
    ("written", "line", "said"),
    [
        (b"garbage", 1, "line 1 is no JSON object: "),
        (b"x\ny\n", 1, "line 1 is no JSON object, the first of 2 such lines: "),
        (STEP + b"\x00\xff\x1b[2J\n[1]\n\n5\n", 2, "line 2 is no JSON object, the first of 3 such lines: "),
        (STEP + b'{"step": 2, "lo\n', 2, "line 2 is no JSON object: "),  # a half line with others after it
        (b"[" * 200_000 + b"\n" + STEP, 1, "line 1 is no JSON object: "),
        (b'{"a":' * 10_000 + b"\n", 1, "line 1 is no JSON object: "),
        (STEP + b'{"step": 2, "lo', None, ""),  # a run that was killed
        (STEP + b'{"other": NaN}\n\n{"long": "' + b"x" * 200_000 + b'"}\n', None, ""),
        (b'{"long": "' + b"x" * 200_000 + b'"}\n5\n', 2, "line 2 is no JSON object: "),
        (b"", None, ""),
    ],
    ids=["garbage", "two", "bytes", "half", "long", "deep", "killed", "another's", "behind a long one", "empty"],
)
def test_a_line_of_the_metrics_that_is_no_json_is_told(
    tmp_path: Path, written: bytes, line: int | None, said: str
) -> None:
    path = file_with(tmp_path / "metrics.jsonl", written)
    for given in (path, tmp_path):
        causes = [cause for cause in diagnose([given]) if cause.cause == "no-json"]
        assert [cause.place for cause in causes] == ([] if line is None else [f"{path}:{line}"])
        assert all(said in cause.meaning and cause.evidence.isprintable() for cause in causes)


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
    (
        "[F ProcessGroupNCCL.cpp:1553] Terminating the process, due to ProcessGroupNCCL watchdog hang.\n",
        "hung",
        (),
        "CUDA",
    ),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n", "killed", (), "from outside"),
    ("ray.exceptions.WorkerCrashedError: The worker died unexpectedly.\n", "killed", (), "from outside"),
    (
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined.\n",
        "ranks-missing",
        (),
        "not all processes",
    ),
    (
        "RuntimeError: Rank 3 successfully reached monitoredBarrier, but received errors while waiting for rank 5.\n",
        "collective-timeout",
        (),
        "not all of them joined",
    ),
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


HEALTHY = [f"step {i}/60  loss 5.6 norm 1.2  tokens/s 1,000  peak 3.1 GiB" for i in range(60)]


@pytest.mark.parametrize(("text", "cause", "ranks", "says"), MESSAGES, ids=[row[1] for row in MESSAGES])
def test_messages_that_a_cpu_cannot_provoke(
    text: str, cause: str, ranks: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    first, *_ = read(tmp_path, text.splitlines())
    assert (first.cause, first.ranks) == (cause, ranks)
    assert says in first.meaning
    assert read(tmp_path, HEALTHY) == ()


HELD = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 3 has a total capacity of 79.11 "
    "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use."
)
BEFORE_2_1 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB (GPU 3; 79.11 GiB total capacity; 39.00 GiB already "
    "allocated; 1.00 GiB free)"
)
IN_USE = {HELD: 78.0, BEFORE_2_1: 39.0, OOM: None, "RuntimeError: DefaultCPUAllocator: can't allocate memory": None}


@pytest.mark.parametrize("line", IN_USE, ids=["torch 2.1", "before", "no numbers", "of the host"])
def test_an_out_of_memory_is_told_beside_the_plan(line: str, tmp_path: Path) -> None:
    plan = kit.plan("llama-3.1-8b", "8xH100", pins=kit.Pins(engine="deepspeed", zero_stage=3))
    (cause,), held = read(tmp_path, [line], plan), IN_USE[line]
    assert ("GiB of host memory a node, of" in cause.meaning) is ("CPU" in line)
    assert (f"predicted a peak of {plan.predicted.peak_gib:.1f} of" in cause.meaning) is ("CPU" not in line)
    times = "" if held is None else f", the process held {held:.1f}, {held / plan.predicted.peak_gib:.2f} times that"
    assert cause.meaning.endswith(times) is True
    assert ("the process held" in cause.meaning) is bool(times)
    assert "predicted" not in read(tmp_path, [line])[0].meaning


def test_a_record_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path, (str(tmp_path / "ran"),))

    none = pickle.dumps({"entries": []})
    files_in(tmp_path, {
        "rank_0": pickle.dumps({"entries": [Bad()]}), "rank_1": b"\x80\x04 cut", "rank_2": b"no pickle",
        "rank_3": pickle.dumps({"entries": {}}), "rank_4": pickle.dumps({"entries": [{}, 7]}), "other": none,
        "rank_5": pickle.dumps(["entries"]), "trace_12": none,
    })  # fmt: skip
    assert flight_recorder.records([tmp_path, tmp_path / "rank_3"]) == {12: flight_recorder.Record({}, [])}


def test_the_command_line() -> None:
    run = kit_main("doctor", str(LOGS / "disk-full.log"), "--json")
    assert (run.code, json.loads(run.out)[0]["cause"]) == (1, "disk-full")
    assert "no such log" in refusal(SpecError, diagnose, [LOGS / "none.log"])


@pytest.mark.parametrize("other", [None, "model.safetensors"])
def test_a_directory_without_logs_is_an_error_and_no_word_of_health(tmp_path: Path, other: str | None) -> None:
    if other:
        (tmp_path / other).write_bytes(b"{}")
    assert re.search(
        r"no log \(\.log, .* no metrics\.jsonl and no flight record there; name the",
        refusal(SpecError, diagnose, [tmp_path]),
    )
