"""What can be known before a process starts is said before a process starts."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs

import kit
from kit.emit.run_directory import RunDirectory, write
from kit.errors import KitError, RunDirectoryError
from kit.preflight.requirements import requirements_of
from kit.preflight.run_checks import preflight
from kit.specs.run import BlendedSetSpec, DataSpec, RunSpec
from tests.support.s3 import s3_server

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 127}}, "added_tokens": []}))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"train{suffix}").touch()
    (tmp_path / "train.json").write_text(json.dumps({"max_token_id": 127, "num_tokens": 1000}))
    job = kit.JobSpec(seq_length=32, global_batch_size=8, total_tokens=10_000, precision="fp32")
    plan = kit.plan(model, "1xcpu", job, kit.Pins(engine="torch"))
    return write(plan, RunSpec(model_path=str(model), data=DataSpec(train=str(tmp_path / "train"))), tmp_path / "run")


def test_a_good_run_passes(rundir: RunDirectory) -> None:
    preflight(rundir)


def test_a_tokenizer_larger_than_the_model(rundir: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 128}}}))
    check(rundir, "has 129 tokens and the model's vocab_size is 128")


def test_another_model_than_planned(rundir: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    check(rundir, "num_layers=3 where the plan has 2")


def test_missing_model_and_data_are_reported_together(rundir: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "train.idx").unlink()
    check(rundir, "no config.json there", "train.idx is missing")


def test_data_that_the_model_cannot_read(rundir: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps({"max_token_id": 128, "num_tokens": 1000}))
    check(rundir, "holds token 128 and the model's vocab_size is 128")
    (tmp_path / "train.json").write_text(json.dumps({"max_token_id": 1, "num_tokens": 32}))
    check(rundir, "32 tokens make no sample of job.seq_length=32")


def test_a_blend_of_sets_that_do_not_go_together(rundir: RunDirectory, tmp_path: Path) -> None:
    def with_second(**facts: object) -> RunDirectory:
        known: dict[str, object] = {"max_token_id": 127, "num_tokens": 1000, "tokenizer": "ours", "vocab_size": 128}
        known["chat_template"] = "a"
        for name, values in (("train", known), ("second", known | facts)):
            for suffix in (".bin", ".idx"):
                (tmp_path / f"{name}{suffix}").touch()
            (tmp_path / f"{name}.json").write_text(json.dumps(values))
        sets = {name: BlendedSetSpec(path=str(tmp_path / name), weight=1) for name in ("train", "second")}
        return dataclasses.replace(rundir, run=RunSpec(data=DataSpec(blend=sets)))

    preflight(with_second())
    check(with_second(tokenizer="theirs"), "run.data.blend.second.path=", "was tokenised with theirs", "with ours")
    check(with_second(vocab_size=100), "(100 ids)")
    check(with_second(chat_template="b"), "were written with different chat templates", "with the same --chat-template")
    preflight(with_second(chat_template=None))  # prompts and completions have none
    check(with_second(num_tokens=0), "second: 0 tokens make no sample")
    check(with_second(max_token_id=128), "second: holds token 128")
    without_sidecar = with_second()
    (tmp_path / "second.json").unlink()
    check(without_sidecar, "second: holds no text")
    (tmp_path / "second.idx").unlink()
    check(without_sidecar, "second.idx is missing")


@pytest.fixture
def address(rundir: RunDirectory, tmp_path: Path) -> Iterator[str]:
    """A copy of the training set in a bucket."""
    with s3_server("bucket"):
        for suffix in (".bin", ".idx", ".json"):
            boto3.client("s3").upload_file(f"{tmp_path}/train{suffix}", "bucket", f"sets/a{suffix}")
        yield "s3://bucket/sets/a"


class TestASetInObjectStorage:
    def test_is_checked_as_one_on_a_disk(self, rundir: RunDirectory, address: str) -> None:
        def facts(**changed: object) -> None:
            known = {"max_token_id": 127, "num_tokens": 1000, "tokenizer": "ours", "vocab_size": 128} | changed
            boto3.client("s3").put_object(Bucket="bucket", Key="sets/a.json", Body=json.dumps(known).encode())

        run = with_data(rundir, train=address)
        preflight(run)
        facts(max_token_id=128)
        check(run, "run.data.train=s3://bucket/sets/a: holds token 128")
        facts(num_tokens=32)
        check(run, "32 tokens make no sample")
        facts(objective="sft")
        check(run, "was written for objective=sft")
        boto3.client("s3").put_object(Bucket="bucket", Key="sets/a.json", Body=b"{")
        check(run, "a.json cannot be read")
        boto3.client("s3").delete_object(Bucket="bucket", Key="sets/a.json")
        check(run, "s3://bucket/sets/a: holds no text")
        boto3.client("s3").delete_object(Bucket="bucket", Key="sets/a.idx")
        check(run, "a.idx is missing", "--out s3://bucket/sets/a")

    def test_has_the_tokenizer_of_the_others(self, rundir: RunDirectory, address: str, tmp_path: Path) -> None:
        known = {"max_token_id": 127, "num_tokens": 1000, "vocab_size": 128}
        (tmp_path / "train.json").write_text(json.dumps(known | {"tokenizer": "ours"}))
        body = json.dumps(known | {"tokenizer": "theirs"}).encode()
        boto3.client("s3").put_object(Bucket="bucket", Key="sets/a.json", Body=body)
        data = {"train": str(tmp_path / "train"), "validation_sets": {"b": address}}
        check(with_data(rundir, **data), "validation_sets.b=s3://bucket/sets/a: was tokenised with theirs")

    def test_a_wrong_bucket_rights_and_credentials(
        self, rundir: RunDirectory, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check(with_data(rundir, train="s3://no-such-bucket/a"), "s3://no-such-bucket/a: a.bin is missing")
        check(
            with_data(rundir, train="s4://bucket/a"), "run.data.train=s4://bucket/a", "deepspeed-megatron-kit[storage]"
        )
        s3fs.S3FileSystem.clear_instance_cache()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        check(with_data(rundir, train=address), "reading a.bin of s3://bucket/sets failed", "credentials")

    def test_keeps_its_address_in_the_run_directory(self, rundir: RunDirectory, address: str) -> None:
        blend = {"x": BlendedSetSpec(path=address, weight=1)}
        run = RunSpec(data=DataSpec(blend=blend, validation=address, validation_sets={"v": address}))
        written = write(rundir.plan, run, rundir.path.parent / "another")
        assert RunDirectory.open(written.path).run.data == run.data
        assert requirements_of(written).packages[-1] == "s3fs"
        assert not [path for path in requirements_of(written).paths if "s3:" in path]


def with_data(rundir: RunDirectory, **data: Any) -> RunDirectory:
    return dataclasses.replace(rundir, run=RunSpec(data=DataSpec(**data)))


def test_a_disk_too_small_for_one_checkpoint(rundir: RunDirectory) -> None:
    huge = dataclasses.replace(rundir.plan.model, vocab_size=2**24, hidden_size=2**18, head_dim=2**12)
    plan = dataclasses.replace(rundir.plan, model=huge)
    check(dataclasses.replace(rundir, plan=plan, run=RunSpec(data=rundir.run.data)), "one checkpoint takes", "GiB free")


def test_a_resume_path_that_is_no_checkpoint(rundir: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a checkpoint"):
        preflight(rundir, tmp_path)


def check(rundir: RunDirectory, *parts: str) -> None:
    with pytest.raises(KitError) as caught:
        preflight(rundir)
    assert [part for part in parts if part not in str(caught.value)] == []
