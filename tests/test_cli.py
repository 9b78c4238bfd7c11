"""The command line as a user meets it: a clear error, a non-zero exit, no traceback, nothing overwritten."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from unittest.mock import Mock

import pytest

from kit import Plan, __version__
from tests.emit.plans import CONFIG
from tests.support import ROOT
from tests.support.files import files_in
from tests.support.in_process import kit_main
from tests.support.refusals import refusal
from tests.support.terminal import OnTerminal, without_moves

TINY = str(ROOT / "recipes" / "tiny-llama-pretrain-zero3-2xcpu.yaml")
LLAMA = ("plan", "llama-3.1-8b", "--gpus")
PLAN = (*LLAMA, "8xH100")


def kit_process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what a terminal, a pipe or a shell does to it."""
    return subprocess.run(
        [sys.executable, "-m", "kit", *words], capture_output=True, timeout=60, check=False,
        encoding=environment.get("PYTHONIOENCODING", "utf-8"),
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--lora",), "job.lora.four_bit", False),
        (("--qlora",), "job.lora.four_bit", True),
        (("--objective", "sft"), "job.objective", "sft"),
        (("--objective", "sft", "--epochs", "0.5"), "job.epochs", 0.5),
        (("--optimizer", "adamw-8bit"), "job.optimizer.name", "adamw-8bit"),
        (("--seq-length", "2,048"), "job.seq_length", 2048),
        (("--total-tokens", "1.5B"), "job.total_tokens", 1_500_000_000),
        (("--global-batch-size", "64.0"), "job.global_batch_size", 64),
        (("--attention", "cudnn"), "layout.attention_kernel", "cudnn"),
        (("--engine", "deepspeed"), "layout.engine", "deepspeed"),
        (("--precision", "fp32"), "job.precision", "fp32"),
        (("cluster.num_nodes=2", "cluster.inter_node_gbytes_per_s=50"), "cluster.num_gpus", 16),
        (("job.grad_clip=2", "layout.micro_batch_size=2"), "job.grad_clip", 2.0),
        (("--price", "20"), "cluster.price_per_node_hour_usd", 20.0),
    ],
)
def test_the_job_is_said_without_a_recipe(words: tuple[str, ...], field: str, value: object, tmp_path: Path) -> None:
    """A file that exists is not overwritten."""
    file = tmp_path / "plan.yaml"
    command = ["plan", "llama-3.2-1b", "--gpus", "8xH100", *words, "--save", str(file)]
    done = kit_main(*command)
    assert done.code == 0, done.err
    assert attrgetter(field)(Plan.load(file)) == value
    assert f"kit memory llama-3.2-1b --gpus 8xH100 {'' if words[0].startswith('--') else words[0]}" in done.out
    before = file.read_bytes()
    assert "not overwritten" in kit_main(*command).err
    assert file.read_bytes() == before


BAD: list[tuple[tuple[str, ...], list[str]]] = [
    (("plan", "llama-9-8b", "--gpus", "8xH100"), ["llama-9-8b", "llama-3"]),
    ((*LLAMA, "8xH1000"), ["H1000", "H100"]),
    ((*LLAMA, "0xH100"), ["0xH100"]),
    (("plan", "llama-3.1-8b"), ["--gpus is missing", "--deadline DAYS"]),
    (("memory", "llama-3.1-8b"), ["--gpus is missing"]),
    (("memory",), ["or --largest"]),
    (("memory", "gpt2", "--largest", "--gpus", "8xH100"), ["leave the model out"]),
    (("memory", "--largest"), ["name them, as in --gpus"]),
    (("plan", "llama-3.1-405b", "--gpus", "1xRTX4090"), ["GiB"]),
    ((*PLAN, "layout.cp=3", "--engine", "megatron"), ["cp=3", "4096"]),
    ((*PLAN, "layout.tp=6", "--engine", "megatron"), ["tp=6", "32"]),
    ((*PLAN, "layout.tpp=6"), ["tpp", "tp"]),
    ((*PLAN, "--engine", "megatorn"), ["megatorn", "megatron"]),
    (("plan", "none.yaml"), ["none.yaml", "No such file"]),
    (("plan", "none.yaml", "--deadline", "3"), ["a recipe names its own"]),
    (("plan", "llama-3.1-8b", "--budget", "3"), ["give --total-tokens"]),
    (("plan", "none.yaml", "--price", "3"), ["--gpus or --clusters name"]),
    (("plan", "llama-3.1-8b", "--deadline", "-1"), ["deadline_days=-1", "above 0"]),
    (("plan", "llama-3.1-8b", "--by", "luck"), ["--by 'luck'", "gpus, money or time"]),
    (("plan", "llama-3.1-8b", "--clusters", "8xH100", "--by", "time"), ["no plan"]),
    (("plan", "llama-3.1-8b", "--clusters", "8xH100", "--gpus", "8xH100"), ["no plan"]),
    (("plan", TINY, "--clusters", "8xH100", "--seq-length", "8"), ["job.seq_length=8192"]),
    ((*PLAN, "--calibrate", "x.json"), ["--calibration calibration.yaml"]),
    ((*PLAN, "layout.engine=torch", "--engine", "megatron"), ["one choice has two values"]),
    ((*PLAN, "layout.tp=8", "layout.tp=4"), ["tp=8 and layout.tp=4"]),
    (("explain", *PLAN[1:], "--what-if", "job.precision=int4"), ["precision=int4", "bf16"]),
    (("explain", *PLAN[1:], "--what-if", "tp=4"), ["write layout.tp=4"]),
    ((*PLAN, "--tp", "8"), ["--tp", "write layout.tp="]),
    ((*PLAN, "--micro-batch-size=8"), ["write layout.micro_batch_size="]),
    ((*PLAN, "run.steps=8"), ["layout.key=value", "options"]),
    ((*LLAMA, "8 H100"), ["did you mean 8xH100?"]),
    ((*LLAMA, "H100x64"), ["did you mean 64xH100?"]),
    ((*LLAMA, "H100:8"), ["did you mean 8xH100?"]),
    ((*LLAMA, "A100 x 2"), ["did you mean 2xA100-40 or 2xA100-80?"]),
    ((*PLAN, "--sft"), ["write --objective sft"]),
    ((*PLAN, "--deepspeed"), ["write --engine deepspeed"]),
    ((*PLAN, "--muon"), ["write --optimizer muon"]),
    ((*PLAN, "--seq-length", "4k"), ["write the digits"]),
    ((*PLAN, "--seq-length", "2.5"), ["whole number"]),
    ((*PLAN, "--seq-length", "0"), ["at least 1"]),
    (("lint", "none.json", "--seq-length", "2B"), ["--seq-length 2000000000", "at most 1073741824"]),
    (("train", "mine.yaml", "--fp8"), ["write job.precision=fp8"]),
    (("plan", TINY, "--gpus", "8xH100", "--qlora", "--optimizer", "sgd", "--seq-length", "8"),
     ["cluster=8xH100 job.seq_length=8 job.lora.four_bit=true job.optimizer.name=sgd"]),
    (("plan", TINY, "layout.zero_stage=2", "layout.zero_stage=3"), ["zero_stage=2 and layout.zero_stage=3"]),
    (("emit", "none.yaml", "--out", "x"), ["none.yaml", "No such file"]),
    (("train", "none"), ["is not a run directory"]),
    (("convert", "model", "none", "--out", "x"), ["none", "does not exist"]),
    (("convert", "data", "x.txt", "--tokenizer", "t", "--out", "x", "--chat-template", "plain"),
     ["--chat-template plain", "only sft has chats"]),
    (("convert", "data", "x", "--tokenizer", "t", "--out", "x", "--objective", "sft", "--text-key", "body"),
     ["--text-key body", "fields of their own"]),
    # What a stage, an engine or a machine forbids.
    (("plan", "llama-3.1-8b", "--gpus", "8xA100-40", "layout.zero_stage=2", "layout.offload_optimizer=nvme",
      "--engine", "deepspeed"), ["only stage 3 swaps"]),
    ((*PLAN, "--engine", "deepspeed", "layout.zero_stage=0", "layout.offload_optimizer=cpu"), ["zero_stage=1, 2 or 3"]),
    ((*PLAN, "--engine", "deepspeed", "layout.zero_stage=2", "layout.pp=2"), ["excludes pipeline parallelism"]),
    ((*PLAN, "--engine", "deepspeed", "layout.zero_stage=2", "layout.zero_hpz=2"), ["it is part of stage 3; use"]),
    ((*PLAN, "--engine", "deepspeed", "--optimizer", "muon"), ["optimizer.name=muon"]),
    (("plan", "llama-3-70b", "--gpus", "8xA100-40", "--engine", "deepspeed", "layout.zero_stage=3",
      "layout.offload_optimizer=cpu"),
     ["GiB of host memory a node", "it fits with layout.offload_optimizer left to the planner instead of cpu",
      "it fits with cluster.host_ram_gib=1753 instead of 953, for offload"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "parts"), BAD, ids=lambda value: " ".join(value)[:60])
def test_bad_input_is_one_error_and_exit_code_2(
    words: tuple[str, ...], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kit_main(*words)
    assert done.code == 2
    said = " ".join(done.err.replace("│", " ").split())
    assert [part for part in parts if part not in said] == []
    if "Usage:" not in said:  # of an option that typer reads
        assert done.err.startswith("error: ")
        assert all(line.startswith(("error: ", "hint: ")) for line in done.err.splitlines())
    assert not re.search(r"(?:\b[\w.:][\w.:-]*, ){5}", done.err), "more than five names"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_an_error_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is no extra of kit's is our own bug."""
    lacking = [ModuleNotFoundError("x", name=f"{name}.part") for name in ("numpy", "no_such")]
    monkeypatch.setattr(sys.modules["kit.cli.app"], "app", Mock(side_effect=lacking))
    assert "pip install 'deepspeed-megatron-kit[torch]'" in kit_main("plan").err
    refusal(ModuleNotFoundError, kit_main, "plan")


@pytest.mark.parametrize(
    "words",
    [["llama-3.1-70b", "--gpus", "1xH100"], ["llama-3.1-8b", "--gpus", "1xRTX-4090"], ["mine.yaml"]],
    ids=" ".join,
)
def test_a_hint_can_be_added_as_it_stands(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: llama-3.1-405b\ncluster: 8xH100\n")
    done = kit_main("plan", *words)
    (problem,) = (line for line in done.err.splitlines() if not line.startswith("hint: "))
    assert problem.startswith("error: ")
    changes = re.findall(r"^hint: it fits with ((?:job|cluster|layout)\.?\S*=\S+)", done.err, re.MULTILINE)
    assert any(change.startswith("cluster") for change in changes)
    assert [change for change in changes if kit_main("plan", *words, change).code] == []


def test_commands_that_are_shown_can_be_typed(tmp_path: Path) -> None:
    """Of a model with weights, and of a name; without a price."""
    files_in(tmp_path, {"x.safetensors": "", "config.json": json.dumps(CONFIG)})
    for model, method in ((str(tmp_path), ""), ("gpt2", " --lora")):
        asked = ("--gpus", "1xRTX-4090", "--objective", "sft", *method.split())
        out = kit_main("plan", model, *asked, "--price", "2").out
        assert f"kit train {model} --data chats.jsonl {' '.join(asked)} --out runs/a" in out
        assert f"kit explain {model} {' '.join(asked)}" in out


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ((TINY,), "kit train run    or: run/launch.sh"),
        (
            (TINY, "cluster.num_nodes=2", "cluster.inter_node_gbytes_per_s=1"),
            "cd run && sbatch slurm.sbatch    or, with your hosts in run/hostfile: run/launch_hosts.sh\n"
            "2 nodes: run/README.md has every way",
        ),
        ((TINY, "job.objective=dpo"), "as run/README.md says"),
        (("mine.yaml",), "as run/README.md says (no run.data.train: no file is for kit's own loop)"),
    ],
)
def test_how_a_run_is_started_is_said_last(
    words: tuple[str, ...], start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: gpt2\ncluster: 8xH100\n")
    assert kit_main("emit", *words, "--out", "run").out.endswith(f"\nstart it: {start}\n")


def test_a_chosen_cluster_is_printed_beside_the_json() -> None:
    """For a billion tokens where nobody says how many."""
    done = kit_main("plan", "llama-3.2-1b", "--max-gpus", "8", "--gpus", "p5.48xlarge", "--json")
    assert (json.loads(done.out)["cluster"]["name"], "p5.48xlarge" in done.err) == ("p5.48xlarge", True)
    assert done.err.endswith("\nof 1B tokens\n\n")


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])
def test_a_pipe_of_another_encoding_gets_every_line_whole(encoding: str) -> None:
    done = kit_process(*PLAN, PYTHONIOENCODING=encoding, COLUMNS="40")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) > 60


@pytest.mark.parametrize("no_color", [False, True])
def test_a_narrow_terminal_is_not_overrun(no_color: bool) -> None:
    """Colours only where they are wanted; commands to copy are never broken by kit."""
    words = [sys.executable, "-m", "kit", "plan", "llama-3.2-1b", "--gpus", "8xH100"]
    code, said = OnTerminal(*words, columns=60, **({"NO_COLOR": "1"} if no_color else {})).end()
    assert (code, "\x1b[" in said) == (0, not no_color)
    lines = without_moves(said).splitlines()
    assert len(lines) > 5
    assert 50 < max(len(line) for line in lines if "kit " not in line) <= 60


def test_a_shell_can_complete_commands_and_asks_for_the_version() -> None:
    asked = {"_KIT_COMPLETE": "complete_bash", "COMP_WORDS": "kit me", "COMP_CWORD": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **asked}
    words = [sys.executable, "-c", "import sys; sys.argv = ['kit']; from kit.cli import main; main()"]
    assert subprocess.run(words, stdout=-1, text=True, check=False, env=environment).stdout == "memory\n"
    assert kit_process("--version").stdout == f"kit {__version__}\n"
