"""Sets in object storage: written there, and read by ranges of bytes, as the local files; moto's S3 server."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import boto3
import fsspec
import numpy as np
import pytest
import torch

from kit.errors import DataError, SpecError
from kit.specs.run import BlendedSetSpec, CheckpointSpec, DataSpec
from kit.training.data import indexed_files
from kit.training.data.indexed import IndexedTokens
from kit.training.data.loader import DataLoader
from tests.support import runs as jobs
from tests.support import tiny
from tests.support.refusals import refusal
from tests.support.s3 import SECRET
from tests.support.workers import pool
from tests.system.kills import cases
from tests.system.kills.__main__ import compare
from tests.training.pairs import pair

BUCKET = "s3://bucket/sets"
SUFFIXES = (".bin", ".idx", ".json")
OBJECTIVE = {"text": "pretrain", "blend": "pretrain", "packed": "sft"}
"""Kind of a set → its objective, where it is another word."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(indexed_files, "PAUSES_S", (0.05, 0.05, 0.05))


def put(prefix: Path, name: str = "", suffixes: tuple[str, ...] = SUFFIXES) -> str:
    """The address of a copy of a local pair."""
    for suffix in suffixes:
        boto3.client("s3").upload_file(f"{prefix}{suffix}", "bucket", f"sets/{name or prefix.name}{suffix}")
    return f"{BUCKET}/{name or prefix.name}"


def made(prefix: Path, objective: str = "pretrain", seed: int = 0) -> Path:
    """Text, or rows of two parts."""
    if objective == "pretrain":
        return pair(prefix, tiny.documents(seed=seed))
    generator = np.random.default_rng(seed)
    parts = [[generator.integers(0, 128, n).tolist() for n in generator.integers(1, 14, 2)] for _ in range(40)]
    return pair(prefix, parts, objective, **{"decoder_start_token_id": 0} if objective == "seq2seq" else {})


def requests(server, status: int | None = None) -> Counter[str]:
    """Counts what comes in from now on: "GET .bin", … All of it is answered with ``status``, if there is one."""
    seen: Counter[str] = Counter()
    server.fault = lambda method, key: seen.update([f"{method} {Path(key).suffix}"]) or status
    return seen


def loader(data: DataSpec, objective: str = "pretrain") -> DataLoader:
    plan = tiny.plan(dp=2, micro_batch_size=2, gradient_accumulation_steps=3, job={"objective": objective})
    rank = SimpleNamespace(dp_rank=1, dp_size=2)
    return DataLoader.open(plan, tiny.run_directory_spec(data=data, validation_sequences=9), rank)


def batches(data: DataSpec, objective: str = "pretrain") -> list[dict[str, object]]:
    opened = loader(data, objective)
    return [
        {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in vars(batch).items()}
        for batch in chain(*(opened.step(step * 12) for step in range(3)), *opened.validation_batches().values())
    ]


def sets(directory: Path, kind: str, at) -> DataSpec:
    """Data of a kind. ``at``: local prefix → what the run names."""
    first, second, held = (directory / name for name in ("first", "second", "held"))
    for seed, prefix in enumerate((first, second, held)):
        if not Path(f"{prefix}.bin").exists():
            made(prefix, OBJECTIVE.get(kind, kind), seed)
    common = {"validation": at(held), "validation_sets": {"second": at(second)}, "packing": kind == "packed"}
    if kind == "blend":
        parts = {name: BlendedSetSpec(path=at(p), weight=w) for name, p, w in (("a", first, 2), ("b", second, 1))}
        return DataSpec(blend=parts, **common)
    return DataSpec(train=at(first), **common)


@pytest.mark.everyday("text")
@pytest.mark.parametrize("kind", ["text", "blend", "sft", "packed", "seq2seq"])
def test_micro_batches_are_those_of_the_local_files(tmp_path, s3, kind):
    here, there = (batches(sets(tmp_path, kind, at), OBJECTIVE.get(kind, kind)) for at in (str, put))
    assert there == here
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".bin") and path.parent != tmp_path]
    assert {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()} == {".idx", ".lock"}


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_other_protocols(tmp_path, protocol):
    def copied(prefix: Path) -> str:
        for suffix in SUFFIXES:
            with fsspec.open(f"{protocol}://{tmp_path}/away/{prefix.name}{suffix}", "wb", auto_mkdir=True) as file:
                file.write(Path(f"{prefix}{suffix}").read_bytes())
        return f"{protocol}://{tmp_path}/away/{prefix.name}"

    assert batches(sets(tmp_path, "text", copied)) == batches(sets(tmp_path, "text", str))


# Requests


def test_of_a_step(tmp_path, s3):
    """One for each sample of this rank, in one batch, and one for the version of the object; the index and the
    sidecar at the start."""
    data = sets(tmp_path, "text", put)
    seen = requests(s3)
    opened = loader(data)
    assert (seen["GET .bin"], seen["GET .idx"]) == (0, 3)
    seen.clear()
    opened.step(0)
    assert seen["HEAD .bin"] == 1
    assert 4 <= seen["GET .bin"] <= 6  # samples that lie side by side are one request
    seen.clear()
    opened.validation_batches()  # in file order: a few requests for all
    assert seen["GET .bin"] <= 2 * 3
    seen.clear()
    loader(data)
    assert seen["GET .idx"] == 0


def test_all_of_a_step_run_at_the_same_time(tmp_path, s3):
    opened = loader(sets(tmp_path, "text", put))
    seen = requests(s3)
    opened.step(0)
    meeting = threading.Barrier(seen["GET .bin"])

    def fault(method: str, key: str) -> None:
        if method == "GET":
            meeting.wait(20)

    s3.fault = fault
    opened.step(0)


def test_several_processes_fetch_an_index_once(tmp_path, s3):
    address = put(made(tmp_path / "a"))
    seen = requests(s3)
    environment = {key: value for key, value in os.environ.items() if key.startswith(("AWS_", "XDG_"))}
    assert pool("torch", 2).run(opened_length, address, environment) == [len(IndexedTokens(tmp_path / "a"))] * 2
    assert seen["GET .idx"] == 1


def opened_length(address: str, environment: dict[str, str]) -> int:
    with mock.patch.dict(os.environ, environment):
        return len(IndexedTokens(address))


# Failures


@pytest.fixture
def address(tmp_path, s3):
    return put(made(tmp_path / "a"))


def test_a_transient_error_is_outlived(s3, tmp_path, address):
    opened = IndexedTokens(address)
    left = [5]  # all four, then one of them

    def fault(method: str, key: str) -> int | None:
        left[0] -= method == "GET" and key.endswith(".bin")
        return 503 if method == "GET" and left[0] >= 0 else None

    s3.fault = fault
    ranges = [(k * 97, 33) for k in range(4)]
    assert np.array_equal(opened.read_all(ranges), IndexedTokens(tmp_path / "a").read_all(ranges))
    assert left[0] == 5 - (4 + 4 + 1)  # what has come is not asked for again


@pytest.mark.parametrize(("status", "tries"), [(503, 4), (403, 2)])
def test_a_lasting_one_names_the_address(s3, address, status, tries):
    opened = IndexedTokens(address)
    seen = requests(s3, status)
    said = refusal(DataError, opened.read, 0, 5)
    assert re.search(rf"reading a\.bin of {BUCKET} failed: .*credentials", said)
    assert SECRET not in said
    assert seen["GET .bin"] == tries


@pytest.mark.nightly
def test_an_object_that_is_cut_short(s3, address):
    opened = IndexedTokens(address)
    boto3.client("s3").put_object(Bucket="bucket", Key="sets/a.bin", Body=b"\0" * 40)
    assert "a.bin of s3://bucket/sets failed" in refusal(DataError, opened.read, 0, 40)
    assert "a.bin has 40 bytes where its index asks for" in refusal(DataError, IndexedTokens, address)


def test_an_object_that_changes(tmp_path, s3, address):
    opened = IndexedTokens(address)
    opened.read(0, 5)
    changed = (tmp_path / "a.bin").read_bytes()[:-2] + b"\1\0"
    boto3.client("s3").put_object(Bucket="bucket", Key="sets/a.bin", Body=changed)
    assert "s3://bucket/sets/a.bin was replaced while the run reads it (ETag" in refusal(DataError, opened.read, 0, 5)


def test_an_index_of_before_is_not_used(tmp_path, s3):
    """Another set at the address, of the same sizes and the same tokens, whose rows end elsewhere."""
    for name, parts in (("a", [[1, 2, 3], [4]]), ("b", [[1], [2, 3, 4]])):
        pair(tmp_path / name, [parts], "sft")
    assert os.path.getsize(tmp_path / "a.idx") == os.path.getsize(tmp_path / "b.idx")
    assert IndexedTokens(put(tmp_path / "a", "x")).sequence_lengths.tolist() == [3, 1]
    assert IndexedTokens(put(tmp_path / "b", "x")).sequence_lengths.tolist() == [1, 3]


@pytest.mark.everyday("bucket/sets-.idx", "other-.bin")
@pytest.mark.parametrize(("prefix", "suffix"), [("bucket/sets", ".bin"), ("bucket/sets", ".idx"), ("other", ".bin")])
def test_a_missing_object(s3, address, prefix, suffix):
    boto3.client("s3").delete_object(Bucket="bucket", Key=f"sets/a{suffix}")
    assert f"s3://{prefix}/a{suffix} is missing" in refusal(DataError, IndexedTokens, f"s3://{prefix}/a")


def test_a_cache_that_cannot_be_written(tmp_path, address):
    (tmp_path / "cache").write_text("a file")
    assert re.search(r"cannot be copied to .* set XDG_CACHE_HOME", refusal(DataError, IndexedTokens, address))


@pytest.mark.parametrize("address", ["s3://key:hunter2@bucket/a", "az://box/a?sig=hunter2", "s3://"])
@pytest.mark.parametrize(
    "said_to",
    [
        lambda address: CheckpointSpec(remote=address),
        lambda address: DataSpec(train=address),
        lambda address: DataSpec(train="a", validation=address),
        lambda address: DataSpec(train="a", validation_sets={"x": address}),
        lambda address: DataSpec(blend={"x": BlendedSetSpec(path=address, weight=1)}),
    ],
)
def test_addresses_that_are_refused(address, said_to):
    assert "hunter2" not in refusal(SpecError, said_to, address)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["torch-fsdp2", "deepspeed-zero2", "megatron-tp2-sp"])
def test_two_processes_are_killed_and_go_on(tmp_path, s3, name):
    """As a user starts them: the metrics and the state of the run on local files, bit for bit."""
    case = next(each for each in cases.CASES if each.name == name)
    here = cases.prepare(tmp_path / "data")
    for part in ("train", "validation"):
        put(here / part)
    whole, run = cases.emit(case, tmp_path / "whole", here, 12), cases.emit(case, tmp_path / "run", BUCKET, 12)
    jobs.train(whole)
    assert jobs.train_until_killed(run, 7) < 12
    jobs.train(run, "--resume", "auto")
    assert compare(whole.path, run.path) == ""
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert SECRET.encode() not in b"".join(path.read_bytes() for path in files)
    assert not [path for path in files if path.suffix in (".bin", ".idx")]


def test_megatron_core_reads_the_set_itself(tmp_path, s3):
    """With what pretrain_gpt.sh has: no mapping, and a directory for the index."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig

    address = put(made(tmp_path / "a"))
    config = ObjectStorageConfig(path_to_idx_cache=str(tmp_path / "indexes"))
    theirs, ours = IndexedDataset(address, mmap=False, object_storage_config=config), IndexedTokens(address)
    assert np.array_equal(np.concatenate([theirs[k] for k in range(len(theirs))]), ours.read(0, len(ours)))
