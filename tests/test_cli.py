"""The command line as a user meets it: a clear error, a non-zero exit, no traceback, nothing overwritten."""

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from operator import attrgetter
from pathlib import Path

import pytest

from kit import Plan, __version__

ROOT = Path(__file__).resolve().parents[1]


def kit(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kit", *words],
        capture_output=True,
        encoding=os.environ.get("PYTHONIOENCODING", "utf-8"),
        cwd=cwd,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_plan_prints_a_layout_and_its_reasons() -> None:
    done = kit("plan", "llama-3.1-8b", "--gpus", "8xH100")
    assert done.returncode == 0, done.stderr
    for part in ("8 × H100", "GiB", "step", "MFU", "days"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--lora",), "lora.four_bit", False),
        (("--qlora",), "lora.four_bit", True),
        (("--objective", "sft"), "objective", "sft"),
        (("--objective", "sft", "--epochs", "0.5"), "epochs", 0.5),
        (("--optimizer", "adamw-8bit"), "optimizer.name", "adamw-8bit"),
    ],
)
def test_the_job_is_said_without_a_recipe(words: tuple[str, ...], field: str, value: object, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    done = kit("plan", "llama-3.2-1b", "--gpus", "8xH100", *words, "--attention", "cudnn", "--save", str(plan))
    assert done.returncode == 0, done.stderr
    saved = Plan.load(plan)
    assert attrgetter(field)(saved.job) == value
    assert saved.layout.attention_kernel == "cudnn"


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("gpt2-xl", ["fp16 · 1,024 tokens"]),  # as many as it has positions
        ("t5-small", ["fp16 · 512 tokens"]),  # pairs, without being told
    ],
)
def test_what_is_not_said_follows_the_model(model: str, parts: list[str]) -> None:
    done = kit("plan", model, "--gpus", "1xTitan-RTX", "--precision", "fp16")
    assert done.returncode == 0, done.stderr
    assert [part for part in parts if part not in done.stdout] == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["plan", "llama-9-8b", "--gpus", "8xH100"], ["llama-9-8b", "llama-3"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH1000"], ["H1000", "H100"]),
        (["plan", "llama-3.1-8b", "--gpus", "0xH100"], ["0xH100"]),
        (["plan", "llama-3.1-8b"], ["--gpus is missing"]),
        (["plan", "llama-3.1-405b", "--gpus", "1xRTX4090"], ["GiB"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH100", "layout.cp=3", "--engine", "megatron"], ["cp=3", "4096"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH100", "layout.tp=6", "--engine", "megatron"], ["tp=6", "32"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH100", "layout.tpp=6"], ["tpp", "tp"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH100", "--engine", "megatorn"], ["megatorn", "megatron"]),
        (["plan", "none.yaml"], ["none.yaml", "No such file"]),
        (["plan", "none.yaml", "--deadline", "3"], ["a recipe names its own"]),
        (["plan", "llama-3.1-8b", "--deadline", "-1"], ["deadline_days=-1", "above 0"]),
        (
            ["plan", "llama-3.1-8b", "--gpus", "8xH100", "layout.engine=torch", "--engine", "megatron"],
            ["two values"],
        ),
        (
            ["explain", "llama-3.1-8b", "--gpus", "8xH100", "--what-if", "job.precision=int4"],
            ["precision=int4", "bf16"],
        ),
        (["explain", "llama-3.1-8b", "--gpus", "8xH100", "--what-if", "tp=4"], ["write layout.tp=4"]),
        (["explain", "llama-3.1-8b", "--gpus", "8xH100", "--what-if", "gpus=8xH200"], ["write cluster=8xH200"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH100", "--fix", "tp=8"], ["--fix", "layout.tp=8"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH100", "--tp", "8"], ["--tp", "write layout.tp="]),
        (["memory", "llama-3.1-8b", "--gpus", "8xH100", "--zero=3"], ["--zero", "layout.zero_stage=3"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH100", "run.steps=8"], ["layout.key=value", "options"]),
        (["plan", "llama-3.1-8b", "--gpus", "8 H100"], ["did you mean 8xH100?"]),
        (["plan", "llama-3.1-8b", "--gpus", "H100x64"], ["did you mean 64xH100?"]),
        (["plan", "llama-3.1-8b", "--gpus", "H100:8"], ["did you mean 8xH100?"]),
        (["plan", "llama-3.1-8b", "--gpus", "A100 x 2"], ["did you mean 2xA100-40 or 2xA100-80?"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH100", "--sft"], ["write --objective sft"]),
        (["plan", "llama-3.1-8b", "--gpus", "8xH100", "--full"], ["all weights are trained"]),
        (["lint", "none.json", "--seq-length", "2B"], ["--seq-length 2000000000", "at most 1073741824"]),
        (["train", "mine.yaml", "--fp8"], ["write job.precision=fp8"]),
        (
            ["plan", str(ROOT / "recipes" / "tiny-llama-pretrain-zero3-2xcpu.yaml"), "--gpus", "8xH100", "--qlora"],
            ["cluster=8xH100 job.lora.four_bit=true"],
        ),
        (["emit", "none.yaml", "--out", "x"], ["none.yaml", "No such file"]),
        (["train", "none"], ["is not a run directory"]),
        (["convert", "model", "none", "--out", "x"], ["none", "does not exist"]),
        (
            ["convert", "data", "x.txt", "--tokenizer", "t", "--out", "x", "--chat-template", "plain"],
            ["--chat-template plain", "only sft has chats"],
        ),
        (
            ["convert", "data", "x", "--tokenizer", "t", "--out", "x", "--objective", "sft", "--text-key", "body"],
            ["--text-key body", "fields of their own"],
        ),
        (["emit", "x.yaml", "--check"], ["take no other argument"]),
        (["emit", "--check", "--write-shipped"], ["take no other argument"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in ("plan", "explain", "emit", "train", "convert") else "",
)
def test_bad_input_is_one_error_and_exit_code_2(words: list[str], parts: list[str], tmp_path: Path) -> None:
    done = kit(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr + done.stdout
    assert [part for part in parts if part not in done.stderr] == []
    assert not re.search(r"(?:[\w.:-]+, ){5}", done.stderr), "more than five names"
    assert list(tmp_path.iterdir()) == []


def test_options_take_counts_as_people_write_them() -> None:
    command = ["plan", "llama-3.1-8b", "--gpus", "8xH100", "--json"]
    done = kit(*command, "--total-tokens", "1.5B", "--seq-length", "2,048", "--global-batch-size", "64.0")
    job = json.loads(done.stdout)["job"]
    assert (job["total_tokens"], job["seq_length"], job["global_batch_size"]) == (1_500_000_000, 2048, 64)
    for wrong, said in (("4k", "write the digits"), ("2.5", "whole number"), ("0", "at least 1")):
        done = kit(*command, "--seq-length", wrong)
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.parametrize(
    "words",
    [["llama-3.1-70b", "--gpus", "1xH100"], ["llama-3.1-8b", "--gpus", "1xRTX-4090"], ["mine.yaml"]],
    ids=" ".join,
)
def test_a_hint_can_be_added_as_it_stands(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: llama-3.1-405b\ncluster: 8xH100\n")
    done = kit("plan", *words, cwd=tmp_path)
    assert done.returncode == 2
    (problem,) = (line for line in done.stderr.splitlines() if not line.startswith("hint: "))
    assert problem.startswith("error: ")
    changes = re.findall(r"^hint: it fits with ((?:job|cluster|layout)\.?\S*=\S+)", done.stderr, re.MULTILINE)
    assert any(change.startswith("cluster") for change in changes)
    for change in changes:
        assert kit("plan", *words, change, cwd=tmp_path).returncode == 0, change


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])
def test_a_pipe_of_another_encoding_gets_every_line_whole(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    monkeypatch.setenv("COLUMNS", "40")
    done = kit("plan", "llama-3.1-8b", "--gpus", "8xH100")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) > 60


@pytest.mark.parametrize("no_color", [False, True])
def test_a_narrow_terminal_is_not_overrun(no_color: bool) -> None:
    """Colours only where they are wanted; commands to copy are never broken by kit."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **({"NO_COLOR": "1"} if no_color else {})}
    environment.pop("COLUMNS", None)
    words = [sys.executable, "-m", "kit", "plan", "llama-3.2-1b", "--gpus", "8xH100"]
    with subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env=environment) as process:
        os.close(terminal)
        said = b""
        with contextlib.suppress(OSError):  # the end of a pseudo terminal
            while part := os.read(master, 65536):
                said += part
    os.close(master)
    assert process.returncode == 0
    text = said.decode()
    assert ("\x1b[" in text) != no_color
    lines = re.sub(r"\x1b\[\d*m", "", text).splitlines()
    assert max(len(line) for line in lines if "kit " not in line) <= 60


def test_a_shell_can_complete_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_KIT_COMPLETE": "complete_bash", "COMP_WORDS": "kit me", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['kit']; from kit.cli import main; main()"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["memory"], done.stderr


def test_a_saved_plan_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    assert kit("plan", "llama-3.1-8b", "--gpus", "8xH100", "--save", str(file)).returncode == 0
    before = file.read_bytes()
    again = kit("plan", "llama-3.1-8b", "--gpus", "8xH100", "--save", str(file))
    assert again.returncode == 2
    assert "not overwritten" in again.stderr
    assert file.read_bytes() == before


def test_the_version_is_the_package_s() -> None:
    done = kit("--version")
    assert (done.returncode, done.stdout) == (0, f"kit {__version__}\n")
