"""The doctor's reading of logs: of failures provoked here (tests/diagnose/logs, made by benchmarks.failures), and of
messages that need a GPU or a fabric, as the sources of torch, NCCL and DeepSpeed print them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.failures.__main__ import FAILURES, Failure, found, provoke
from kit.diagnose.logs import diagnose
from kit.errors import SpecError

ROOT = Path(__file__).parents[2]
LOGS = Path(__file__).parent / "logs"


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_provoked_failure(failure: Failure) -> None:
    causes = diagnose([LOGS / f"{failure.name}.log"])
    assert found(failure, causes), [str(cause) for cause in causes]


def test_a_failure_provoked_now(tmp_path: Path) -> None:
    killed = next(failure for failure in FAILURES if failure.name == "killed")
    causes = provoke(killed, tmp_path / "killed")
    assert causes is not None
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
    ("NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n", "gpu-fault", (), "fault"),
    ("RuntimeError: Error building extension 'async_io'\n", "missing-op", (), "missing"),
    ("deepspeed.runtime.config.DeepSpeedConfigError: x\n", "config", (), "refused"),
    ("E socket.cpp: The server socket has failed to bind. EADDRINUSE\n", "port-in-use", (), "taken"),
    ("node-2: Host key verification failed.\n", "ssh", (), "log in"),
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
