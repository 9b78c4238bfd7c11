"""What can be known before a process starts is said before a process starts: packages, GPUs, model, data, disks, memory
and the checkpoint to resume from. A run that lacks one thing differs in nothing else from one that passes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import boto3
import pytest
import s3fs

from kit.emit.run_directory import RunDirectory, write
from kit.errors import KitError
from kit.planner.plan import Plan
from kit.preflight import requirements, run_checks
from kit.preflight.check_result import CheckResult
from kit.preflight.requirements import (
    check_gpus,
    check_host_memory,
    check_nvme,
    check_optimizer,
    gpus_here,
    swap_directory,
)
from kit.preflight.run_checks import missing_packages, preflight
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import LoraSpec, OptimizerSpec
from kit.specs.local import host_memory
from kit.specs.run import BlendedSetSpec, CheckpointSpec, DataSpec, RunSpec, StreamSpec
from kit.units import to_gib
from tests.emit.plans import CONFIG, DENSE, FSDP2, ON_CPU, TORCH, ZERO2, ZERO3, plan_of, stand_in
from tests.support.files import file_with, files_in
from tests.support.in_process import kit_refusal
from tests.support.refusals import refusal
from tests.support.s3 import s3_server

GOOD = {"max_token_id": 127, "num_tokens": 1000}
ROWS = GOOD | {"objective": "sft", "longest": 33}
OURS = GOOD | {"tokenizer": "ours", "vocab_size": 128, "chat_template": "a"}
JOB = {"seq_length": 32, "total_tokens": 10_000, "precision": "fp32"}


def written(place: Path, name: str, facts: dict[str, Any] | None) -> str:
    """The prefix of a pair of files; empty ones."""
    side = {} if facts is None else {f"{name}.json": json.dumps(facts)}
    return str(files_in(place, {f"{name}.bin": "", f"{name}.idx": ""} | side) / name)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    files_in(tmp_path / "model", {
        "config.json": json.dumps(CONFIG),
        "tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 127}}, "added_tokens": []}',
    })  # fmt: skip
    plan = plan_of(load_model(str(tmp_path / "model")), "1xcpu", JOB, **TORCH)
    run = RunSpec(model_path=str(tmp_path / "model"), data=DataSpec(train=written(tmp_path, "train", GOOD)))
    return write(plan, run, tmp_path / "run")


def with_(rundir: RunDirectory, run: dict[str, Any] | None = None, **plan: Any) -> RunDirectory:
    """With other fields of its run, and of its plan's job, layout or model."""
    made = rundir.plan
    for part, fields in plan.items():
        made = replace(made, **{part: replace(getattr(made, part), **fields)})
    return replace(rundir, plan=made, run=replace(rundir.run, **run or {}))


def check(rundir: RunDirectory, *parts: str) -> None:
    """Refused with these parts of a message; without any the run passes."""
    with pytest.raises(KitError) if parts else nullcontext() as caught:
        preflight(rundir)
    assert [part for part in parts if part not in str(caught and caught.value)] == []


def judged(result: CheckResult | None, *parts: str) -> None:
    """A failure with these parts of a message; without any nothing is wrong."""
    told = result and (result.state, *(part for part in parts if part in f"{result.said}; {result.fix}"))
    assert told == (("failure", *parts) if parts else None)


SFT = {"job": {"objective": "sft"}}
ASYNCHRONOUS = CheckpointSpec(asynchronous=True)
CASES: dict[str, tuple[str, dict[str, Any] | str | None, dict[str, Any], list[str]]] = {
    # file → its content (None: gone), changes of the run and of the plan, what is said; nothing for a run that passes
    "a good run": ("train.json", GOOD, {}, []),
    "the largest token": ("model/tokenizer.json", {"model": {"vocab": {"a": 127}}}, {}, []),
    "a token too many": (
        "model/tokenizer.json", {"model": {"vocab": {"a": 128}}}, {},
        ["has 129 tokens and the model's vocab_size is 128", "use the model's own tokenizer"],
    ),
    "an added token too many": (
        "model/tokenizer.json", {"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": 128}]}, {}, ["has 129 tokens"],
    ),
    "a list of tokens": ("model/tokenizer.json", {"model": {"vocab": [["a", 0.0]] * 129}}, {}, ["has 129 tokens"]),
    "no tokens": ("model/tokenizer.json", {}, {}, []),
    "no tokenizer": ("model/tokenizer.json", None, {}, []),
    "half a tokenizer": ("model/tokenizer.json", "{", {}, ["tokenizer.json cannot be read as a tokenizer"]),
    "another model": ("model/config.json", CONFIG | {"num_hidden_layers": 3}, {},
    ["num_layers=3 where the plan has 2"]),
    "two other sizes": (
        "model/config.json", CONFIG | {"vocab_size": 200, "hidden_size": 64}, {},
        ["hidden_size=64 where the plan has 32, vocab_size=200 where the plan has 128", "plan that model"],
    ),
    "no model": ("model/config.json", None, {}, ["no config.json there", "null for random weights"]),
    "a model that is none": ("model/config.json", "{", {}, ["config.json"]),
    "no index": (
        "train.idx", None, {},
        ["train.idx is missing", "kit convert data TEXT --tokenizer DIRECTORY --out train"],
    ),
    "no index of rows": ("train.idx", None, SFT, ["--objective sft --out train"]),
    "no data": ("train.bin", None, {}, ["train.bin is missing"]),
    "no text": ("train.json", None, {}, ["holds no text; leave it out"]),
    "half a sidecar": ("train.json", "{", {}, ["train.json cannot be read", "tokenise again"]),
    "the largest token of data": ("train.json", GOOD | {"max_token_id": 128}, {}, [
        "holds token 128 and the model's vocab_size is 128"]),
    "no sample": ("train.json", GOOD | {"num_tokens": 32}, {}, ["32 tokens make no sample of job.seq_length=32"]),
    "one sample": ("train.json", GOOD | {"num_tokens": 33}, {}, []),
    "rows for text": ("train.json", GOOD | {"objective": "sft"}, {}, [
        "was written for objective=sft and the job has pretrain", "--objective pretrain"]),
    "text for rows": ("train.json", GOOD, SFT, ["was written for objective=pretrain and the job has sft"]),
    # a row of sft is one token longer than what is predicted
    "rows": ("train.json", ROWS | {"num_tokens": 3}, SFT, []),
    "rows too long": ("train.json", ROWS | {"longest": 34}, SFT,
    ["its longest row has 34 tokens and job.seq_length=32"]),
    "pairs too long": (
        "train.json", ROWS | {"objective": "seq2seq"}, {"job": {"objective": "seq2seq"}}, ["longest row has 33 tokens"],
    ),
    "pairs": ("train.json", ROWS | {"objective": "seq2seq", "longest": 32}, {"job": {"objective": "seq2seq"}}, []),
    "a disk too small": (
        "train.json", GOOD, {"model": {"num_layers": 2000, "hidden_size": 2**18, "head_dim": 2**12}},
        ["run is on a disk with", "GiB free and one checkpoint takes", "make room"],
    ),
    "another trainer's": (
        "train.json", None, {"job": {"objective": "dpo"}},
        ["job.objective=dpo is trained by TRL's DPOTrainer, not by kit's own loop; start it as README.md"],
    ),
    # what a run asks for goes together
    "no weights": ("train.json", GOOD, {"run": {"model_path": None}}, []),
    "adapters of nothing": (
        "train.json", GOOD, {"run": {"model_path": None}, "job": {"lora": LoraSpec()}},
        ["job.lora without run.model_path"],
    ),
    "no set": (
        "train.json", GOOD, {"run": {"data": DataSpec()}},
        ["run.data.train is missing, which kit's own loop trains on; name it"],
    ),
    "an unknown protocol": (
        "train.json", GOOD, {"run": {"checkpoint": CheckpointSpec(remote="s4://b/c")}},
        ["run.checkpoint.remote=s4://b/c"],
    ),
    "disks in the background": (
        "train.json", GOOD,
        {"run": {"checkpoint": ASYNCHRONOUS, "nvme_path": "/tmp"}, "layout": {"offload_optimizer": "nvme"}},
        ["run.checkpoint.asynchronous=true with state on NVMe", "use false"],
    ),
    "in the background": ("train.json", GOOD, {"run": {"checkpoint": ASYNCHRONOUS}}, []),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "changes", "said"), CASES.values(), ids=CASES)
def test_a_run_is_checked_before_it_starts(
    name: str, content: Any, changes: dict[str, Any], said: list[str], rundir: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    check(with_(rundir, **changes), *said)


def test_all_problems_are_told_at_once_also_by_the_command(rundir: RunDirectory, tmp_path: Path) -> None:
    for name in ("model/config.json", "train.idx"):
        (tmp_path / name).unlink()
    check(rundir, "no config.json there", "train.idx is missing")
    assert "train.idx is missing" in kit_refusal(["train", str(rundir.path)])
    assert "not a checkpoint" in refusal(KitError, preflight, rundir, tmp_path)


def test_a_checkpoint_to_resume_from_is_one(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    judged(run_checks._checkpoint(tmp_path / "step"), "not a checkpoint (no manifest.json); give auto")
    (tmp_path / "step" / "manifest.json").touch()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert [run_checks._checkpoint(each) for each in (None, tmp_path / "step", tmp_path / "run")] == [None] * 3


def test_a_blend_of_sets_that_do_not_go_together(rundir: RunDirectory, tmp_path: Path) -> None:
    for facts, said in (
        ({}, []),
        ({"chat_template": None}, []),  # prompts and completions have none
        (
            {"tokenizer": "theirs"},
            ["run.data.blend.second.path=", "was tokenised with theirs (128 ids)", "with ours (128"],
        ),
        ({"vocab_size": 100}, ["with ours (100 ids)", "one model reads both", f"into {tmp_path / 'second'}.json"]),
        ({"chat_template": "b"}, ["were written with different chat templates", "with the same --chat-template"]),
        ({"num_tokens": 0}, ["second: 0 tokens make no sample"]),
    ):
        made = [written(tmp_path, "train", OURS), written(tmp_path, "second", OURS | facts)]
        blend = {Path(prefix).name: BlendedSetSpec(path=prefix, weight=1) for prefix in made}
        check(with_(rundir, {"data": DataSpec(blend=blend)}), *said)
    # one set each: what is validated is no part of the training data
    validation = written(tmp_path, "v", OURS | {"tokenizer": "b"})
    preflight(with_(rundir, {"data": DataSpec(train=written(tmp_path, "train", OURS), validation=validation)}))


OTHERS = {
    "deepspeed", "accelerate", "megatron.core", "transformer_engine", "datasets", "peft", "bitsandbytes", "torchao",
}  # fmt: skip
LORA, EIGHT = {"lora": LoraSpec()}, {"optimizer": OptimizerSpec(name="adamw-8bit")}
NEEDS: dict[str, tuple[dict[str, Any], set[str], list[tuple[str, str]]]] = {
    "torch": (FSDP2, {"torch", "transformers"}, [("layout.engine=torch needs torch, transformers,", "[torch]'")]),
    "zero": (ZERO2, {"deepspeed", "accelerate"}, [("layout.engine=deepspeed needs deepspeed, accelerate,",
    "[deepspeed]'")]),
    "zero over megatron": (
        ZERO2 | {"implementation": "local"}, {"megatron.core"}, [("=deepspeed needs megatron.core,", "[deepspeed]'")],
    ),
    "megatron": (DENSE, {"transformer_engine"}, [("needs transformer_engine,", "install torch for your GPU first")]),
    "megatron on amd": (
        DENSE | {"cluster": "8xMI300X"}, {"transformer_engine"}, [("needs transformer_engine,", "ROCm/Transf")],
    ),
    "megatron's own layers": (DENSE | {"implementation": "local"}, {"transformer_engine"}, []),
    "adapters": (FSDP2 | {"job": LORA}, {"peft", "bitsandbytes"}, [("job.lora needs peft,", "[lora]'")]),
    "4 bits": (
        FSDP2 | {"job": {"lora": LoraSpec(four_bit=True)}}, {"bitsandbytes"},
        [("job.lora.four_bit needs bitsandbytes,", "[lora]'")],
    ),
    "weights in 8 bits": (
        ZERO2 | {"job": {"lora": LoraSpec(eight_bit=True)}}, {"bitsandbytes"},
        [("job.lora.eight_bit needs bitsandbytes,", "[lora]'")],
    ),
    "8 bits": (
        ZERO2 | {"job": EIGHT}, {"bitsandbytes"}, [("optimizer.name=adamw-8bit needs bitsandbytes,", "[eight-bit]'")],
    ),
    "fp8": (
        FSDP2 | {"job": {"precision": "fp8"}}, {"torchao"},
        [("precision=fp8 on layout.engine=torch needs torchao,", "[torchao]'")],
    ),
    "fp8 of megatron": (DENSE | {"job": {"precision": "fp8"}}, {"torchao"}, []),
    "a stream": (FSDP2, {"datasets"}, [("run.data.stream needs datasets,", "[data]'")]),
    "all": (FSDP2, OTHERS, []),
}  # fmt: skip


@pytest.mark.parametrize("case", NEEDS)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    case: str, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, absent, expected = NEEDS[case]
    stream = StreamSpec(path="json", data_files=("a",), tokenizer="b") if case == "a stream" else None
    monkeypatch.setattr(run_checks, "_is_installed", lambda name: name not in absent)
    made = replace(rundir, plan=plan_of(**plan), run=RunSpec(data=DataSpec(stream=stream)))
    for result, parts in zip(missing_packages(made), expected, strict=True):
        judged(result, *parts, "not installed for python")


def test_a_package_whose_parent_is_missing_is_not_installed() -> None:
    assert [name for name in ("json.decoder", "no_such.part", "no_such") if run_checks._is_installed(name)] == [
        "json.decoder"
    ]


@pytest.mark.parametrize(
    ("core", "python", "refused"),
    [("0.19.2", "3.12.1", False), ("0.18.9", "3.12.1", True), ("0.19.2", "3.11.7", True), (None, "3.12.1", True)],
)
def test_an_optimizer_asks_for_versions_of_its_own(
    core: str | None, python: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's Muon: docs/optimizers.md."""
    monkeypatch.setattr(requirements, "installed_version", lambda name: core if name == "megatron-core" else "99")
    monkeypatch.setattr(requirements.platform, "python_version", lambda: python)
    said = [f"megatron-core 0.19 or newer ({core or 'none'} here)", "or use layout.engine=torch"] if refused else []
    judged(check_optimizer(plan_of(**DENSE, job={"optimizer": OptimizerSpec(name="muon")})), *said)
    assert check_optimizer(plan_of(**DENSE)) is None


GIB = parse_cluster("4xH100").gpu.memory_gib
H100, A100, A100_40 = ("NVIDIA H100 80GB HBM3", 79.6), ("NVIDIA A100-SXM4-80GB", 80.0), ("NVIDIA A100-SXM4-40GB", 40.0)
SLICE, SMALL = ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5), ("NVIDIA H100 80GB HBM3", GIB * 0.969)
OWN = replace(parse_cluster("4xH100"), gpu=replace(parse_cluster("4xH100").gpu, name="mine"))


@pytest.mark.parametrize(
    ("cluster", "found", "said"),
    [
        ("4xH100", [H100] * 4, None),
        ("4xH100", [H100] * 8, None),
        ("4xH100", None, None),
        ("4xH100", [A100_40, *[H100] * 4], None),
        ("4xH100", [(H100[0], 0.97 * GIB)] * 4, None),  # drivers reserve different amounts
        ("4xH100", [SMALL] * 4, "has 4 x NVIDIA H100 80GB HBM3 (77 GiB)"),
        ("4xA100-80", [A100] * 4, None),
        ("hgx-h100:2", [H100] * 8, None),
        ("2xcpu", [], None),
        (OWN, [A100] * 4, None),  # of a GPU that a user describes only the size is known
        (OWN, [A100_40] * 4, "the plan is for 4 x mine"),
        ("4xH100", [H100] * 3, "has 3 x NVIDIA H100 80GB HBM3 (80 GiB)"),
        ("4xH100", [A100] * 4, "has 4 x NVIDIA A100-SXM4-80GB (80 GiB)"),
        ("4xA100-80", [A100_40] * 4, "has 4 x NVIDIA A100-SXM4-40GB (40 GiB)"),
        (
            "4xH100",
            [A100_40, *[H100] * 3],
            "has 1 x NVIDIA A100-SXM4-40GB (40 GiB), 3 x NVIDIA H100 80GB HBM3 (80 GiB)",
        ),
        ("4xH100", [SLICE] * 4, "(40 GiB)"),
        ("hgx-h100:2", [], "has no GPU"),
    ],
)
def test_other_gpus_than_planned_are_refused(cluster: Any, found: Any, said: str | None) -> None:
    spec = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    here = "COUNTxGPU" if spec.num_nodes > 1 else "local"
    parts = [said, f"plan for what is here: kit emit RECIPE cluster={here}"] if said else []
    judged(check_gpus(plan_of("llama-3.2-1b", spec, **TORCH, dp=spec.num_gpus), found), *parts)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "01"), ("1", "1"), ("1, 0,7", "10"), ("GPU-8f0a", "01"), ("1,GPU-8f0a", "01")],
)
def test_gpus_are_those_that_a_process_sees(
    visible: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose nvidia-smi lists two of them."""
    rows = "#!/bin/sh\necho 'NVIDIA A100-SXM4-40GB, 40960'\necho 'NVIDIA H100 PCIe, 81559'\n"
    monkeypatch.setenv("PATH", stand_in(tmp_path, **{"nvidia-smi": rows})["PATH"])
    listed = (("NVIDIA A100-SXM4-40GB", 40.0), ("NVIDIA H100 PCIe", 81559 / 1024))
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus_here(given) == [listed[int(number)] for number in expected]


SWAPPING = ZERO3 | ON_CPU | {"cluster": replace(parse_cluster("2xcpu"), host_ram_gib=8.0, nvme_gib=10.0), "job": JOB}


def swapping(path: Path | None, gib: float = 0.01, **layout: Any) -> tuple[Plan, RunSpec]:
    plan = plan_of("llama-3.2-1b", **SWAPPING | {"offload_optimizer": "nvme"} | layout)
    plan = replace(plan, predicted=replace(plan.predicted, nvme_gib_per_node=gib))
    return plan, RunSpec(nvme_path=None if path is None else str(path))


def test_a_good_disk_passes_and_is_left_empty(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    assert [
        check_nvme(*asked, tmp_path / "run") for asked in (swapping(disk), swapping(None, offload_optimizer="cpu"))
    ] == [None] * 2
    assert list(disk.iterdir()) == []
    first, second = (swap_directory(*swapping(disk), tmp_path / name) for name in ("a", "b"))
    assert (first and first.parent, first == second) == (disk, False)  # two runs never share swap files
    assert swap_directory(*swapping(disk, offload_optimizer="cpu"), tmp_path / "a") is None


@pytest.mark.parametrize(
    ("path", "gib", "free", "said"),
    [
        (None, 1.0, 1 << 40, ["run.nvme_path is missing"]),
        ("absent", 1.0, 1 << 40, ["no such directory"]),
        ("train.bin", 1.0, 1 << 40, ["run.nvme_path=", "mount the disk there"]),
        (".", 1.0, PermissionError(13, "Permission denied"), ["not writable on", "Permission denied"]),
        (".", 1.0, ValueError("tmpfs"), ["its file system refuses direct I/O (tmpfs)"]),
        (".", 1.51, 3 << 29, ["1.50 GiB free on ", " and the swap files take 1.51; make room"]),
        (".", 1.5, 3 << 29, []),
    ],
)
def test_a_disk_for_swap_files_is_there_writable_and_large_enough(
    path: str | None, gib: float, free: Any, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libaio reads and writes past the page cache, so the disk is asked for direct I/O too."""
    asked = Mock(side_effect=[free])
    monkeypatch.setattr(requirements, "free_bytes", asked)
    judged(check_nvme(*swapping(path and tmp_path / path, gib), tmp_path / "run"), *said)
    assert asked.mock_calls == ([call(tmp_path, direct=True)] if path == "." else [])


def test_swap_files_of_an_earlier_attempt_are_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "free_bytes", lambda *_, **__: 1 << 29)
    asked = swapping(tmp_path, 0.75)
    assert check_nvme(*asked, tmp_path / "run") is not None
    file = Path(str(swap_directory(*asked, tmp_path / "run"))) / "rank0" / "a.swp"
    os.truncate(file_with(file, b""), 1 << 28)
    assert check_nvme(*asked, tmp_path / "run") is None


def test_offload_to_disks_needs_libaio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_library", lambda name: None)
    judged(requirements.check_libaio(swapping(None)[0]), "which this machine lacks", "libaio-dev", "libaio-devel")
    assert requirements.check_libaio(swapping(None, offload_optimizer="cpu")[0]) is None


def test_fewer_processes_than_planned_are_refused(
    rundir: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.training.__main__ import main

    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert main([str(rundir.path)]) == 2
    assert "3 processes were started where the plan has 1" in capsys.readouterr().err


def test_host_memory_that_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CPU processes, what they compute with as well as what is offloaded; a plan that offloads nothing passes."""
    plan = plan_of("llama-3.2-1b", **SWAPPING | {"offload_optimizer": "cpu"})
    available, own = to_gib(host_memory()["MemAvailable"]), 2 * plan.predicted.peak_gib
    for free, asked, said in (
        (available, available - own - 9.0, []),
        (available, available - own + 9.0, [f"offload needs {available + 9.0:.0f}"[:-2]]),
        (0.0, 0.0, []),
    ):
        monkeypatch.setattr(requirements, "host_memory", lambda free=free: {"MemAvailable": free * 2**30})
        judged(check_host_memory(replace(plan, predicted=replace(plan.predicted, host_ram_gib_per_node=asked))), *said)


@pytest.fixture
def address(rundir: RunDirectory, tmp_path: Path) -> Iterator[str]:
    """A copy of the training set in a bucket."""
    with s3_server("bucket"):
        for suffix in (".bin", ".idx", ".json"):
            boto3.client("s3").upload_file(f"{tmp_path}/train{suffix}", "bucket", f"sets/a{suffix}")
        yield "s3://bucket/sets/a"


@pytest.mark.slow
def test_a_set_in_object_storage_is_checked_as_one_on_a_disk(
    rundir: RunDirectory, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = DataSpec(train=address)
    beside = DataSpec(train=written(tmp_path, "train", OURS), validation_sets={"b": address})
    for data, suffix, content, said in (
        (remote, "json", json.dumps(GOOD), []),
        (remote, "json", json.dumps(OURS | {"max_token_id": 128}), [f"run.data.train={address}: holds token 128"]),
        (remote, "json", json.dumps(OURS | {"num_tokens": 32}), ["32 tokens make no sample"]),
        (remote, "json", "{", ["a.json cannot be read"]),
        (
            beside, "json", json.dumps(OURS | {"tokenizer": "b"}),
            [f"validation_sets.b={address}: was tokenised with b"],
        ),
        (remote, "json", None, [f"{address}: holds no text"]),
        (remote, "idx", None, ["a.idx is missing", f"--out {address}"]),
        (DataSpec(train="s3://no-such-bucket/a"), "idx", None, ["s3://no-such-bucket/a: a.bin is missing"]),
        (DataSpec(train="s4://bucket/a"), "idx", None, [
            "run.data.train=s4://bucket/a", "deepspeed-megatron-kit[storage]"]),
    ):  # fmt: skip
        file = {"Bucket": "bucket", "Key": f"sets/a.{suffix}"}
        if content is None:
            boto3.client("s3").delete_object(**file)
        else:
            boto3.client("s3").put_object(**file, Body=content.encode())
        check(with_(rundir, {"data": data}), *said)
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    check(with_(rundir, {"data": remote}), "reading a.bin of s3://bucket/sets failed", "credentials")
