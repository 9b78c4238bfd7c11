"""Runs that stream their data: on every engine, resumed, killed and rewound, they are the undisturbed run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

import kit
from kit.errors import SpecError
from kit.specs.run import RunSpec, StabilitySpec
from kit.training import loop
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.counters import Counters
from kit.training.data.loader import DataLoader
from kit.training.data.stream_source import StreamSource
from tests.support import runs as started
from tests.support import tiny
from tests.support.assets import RECIPE
from tests.support.in_process import kit_refusal
from tests.support.refusals import refusal
from tests.training import runs
from tests.training.streamed import samples, spec, texts, write

LAYOUTS = [
    {"engine": "torch"},
    {"engine": "deepspeed", "zero_stage": 1},
    {"engine": "megatron", "implementation": "local"},
]


@pytest.fixture
def data(tmp_path):
    """Two files for four streams, whose first document is short."""
    return spec(tmp_path, write(tmp_path / "text", "jsonl", ["w1", *texts(159)], 2), streams=4, shuffle_block=2)


def documents_read(rundir, forget):
    """Go on; the number of documents that this rank has read. ``forget``: the checkpoint has no bookmarks."""
    real_documents, real_resume, read = StreamSource.documents, loop.resume_from, []

    def documents(self, *arguments):
        for found in real_documents(self, *arguments):
            read.append(found)
            yield found

    def resume_from(*arguments):
        counters: Counters = real_resume(*arguments)
        return dataclasses.replace(counters, stream=None) if forget else counters

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamSource, "documents", documents)
        patch.setattr(loop, "resume_from", resume_from)
        runs.resumed(rundir, None)
    return len(read)


@pytest.mark.everyday("torch")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["engine"])
def test_a_resumed_run_is_the_undisturbed_one(tmp_path, data, layout):
    """On two processes, bit for bit; and with the checkpoint of one process of the torch engine."""
    plan = tiny.plan(dp=2, micro_batch_size=1, gradient_accumulation_steps=2, **layout)
    options = {"data": data, "steps": 24}
    alone = runs.trained(tmp_path / "alone", tiny.plan(gradient_accumulation_steps=2), 6, **options)
    first = alone.path / "checkpoints" / "step-00000006"
    whole = runs.trained(tmp_path / "whole", plan, resume=first, **options)
    resumed = runs.trained(tmp_path / "resumed", plan, 20, resume=first, **options)
    forgot = dataclasses.replace(resumed, path=shutil.copytree(resumed.path, tmp_path / "forgot"))
    read = [runs.everywhere(rundir, documents_read, rundir is forgot) for rundir in (resumed, forgot)]
    assert runs.metrics(resumed) == runs.metrics(forgot) == runs.metrics(whole)
    assert max(read[0]) < min(read[1]) / 2
    runs.resumed(alone, None)
    runs.near(runs.metrics(whole), runs.metrics(alone)[6:])
    place = Checkpoint(resumed.path / "checkpoints" / "step-00000024").manifest.counters.stream
    assert [mark.stream for mark in place.bookmarks] == [0, 1, 2, 3]
    # What is given for one step must not be what is given for another: a batch of other samples has another loss.
    other = dataclasses.replace(data, seed=5)
    assert re.search(
        r"data\.seed=1234, and this run has 5",
        refusal(AssertionError, runs.resumed, runs.with_run(resumed, data=other, steps=26), None),
    )


@runs.one_process
@pytest.mark.parametrize("ahead", [False, True])
def test_a_rewind_goes_on_with_the_samples_after_it(tmp_path, data, ahead, monkeypatch):
    """With and without a thread that reads ahead: each step has the samples of its position."""
    monkeypatch.setattr(loop, "should_prefetch", lambda device: ahead)
    monkeypatch.setattr("kit.training.data.loader.pin", lambda batch: batch)
    real, batches = DataLoader.step, []

    def step(self, position, size=None):
        batches.append((position, real(self, position, size)))
        return batches[-1][1]

    monkeypatch.setattr(DataLoader, "step", step)
    stability = StabilitySpec(window_steps=16, sigmas=2.0, max_rewinds=99, loss_spike="off", gradient_spike="rewind")
    plan = tiny.plan(gradient_accumulation_steps=2)
    rundir = runs.trained(tmp_path / "run", plan, data=data, steps=14, stability=stability)
    assert "rewound" in [event["event"] for event in runs.events(rundir)]
    fresh = samples(data)
    for position, batch in batches:
        windows = np.stack([fresh.read(position + k) for k in range(4)])
        assert (np.concatenate([each.input_ids.numpy() for each in batch]) == windows[:, :-1]).all()


@runs.one_process
def test_without_wrap_it_ends_and_a_checkpoint_is_there(tmp_path, data):
    rundir = runs.prepare(tmp_path / "run", data=dataclasses.replace(data, wrap=False), steps=200)
    said = runs.run_failing(rundir)
    assert re.search(r"wrap=false: virtual stream \d of 4 ends after \d+ samples", said)
    last = int(said.split("none after ")[1].split(";")[0]) // 2
    assert len(runs.metrics(rundir)) == last
    # A run that is finished, too.
    assert [runs.resumed(runs.with_run(rundir, steps=last), None).step for _ in range(2)] == [last] * 2


def words(data):
    stream = {**dataclasses.asdict(data.stream), "data_files": list(data.stream.data_files)}
    model = ("num_layers=2", "hidden_size=32", "ffn_hidden_size=64", "head_dim=8", "vocab_size=128")
    return [
        *(f"model.{word}" for word in model),
        "model.max_position_embeddings=64",
        "cluster=2xcpu",
        "job.seq_length=32",
        "job.global_batch_size=4",
        "layout.micro_batch_size=1",
        "layout.engine=torch",
        "layout.zero_stage=0",
        "run.model_path=null",
        "run.data.train=null",
        "run.data.validation=null",
        *(f"run.data.stream.{key}={json.dumps(value)}" for key, value in stream.items()),
        "run.steps=12",
        "run.checkpoint.every_steps=3",
        "run.logging.every_steps=1",
        "run.logging.gradients_at_steps=[]",
    ]


# Before a process starts


def test_what_the_sources_and_this_machine_lack(tmp_path, data, capsys, monkeypatch):
    rundir = started.emit(RECIPE, tmp_path / "run", words(data))
    run = (rundir.path / "run.yaml").read_text()
    assert str(tmp_path) not in run  # paths are relative
    for old, new, said in (
        ("text_key: text", "text_key: body", "no column 'body'; run.data.stream.text_key: valid are n, text"),
        ("streams: 4", "streams: 170", "virtual stream 0 of 170 has less text than one sample of seq_length=32"),
        ("tokenizer: ../tokenizer", "tokenizer: ../nowhere", "nowhere is not a directory"),
        ("path: json", "path: parquet", "cannot be read"),
    ):
        assert old in run
        (rundir.path / "run.yaml").write_text(run.replace(old, new))
        assert said in kit_refusal(["train", str(rundir.path)])
    monkeypatch.setattr("kit.preflight.run_checks._is_installed", lambda name: name != "datasets")
    found = kit_refusal(["train", str(rundir.path)])
    assert "run.data.stream needs datasets" in found
    assert "pip install 'deepspeed-megatron-kit[data]'" in found


def test_fine_tuning_is_refused(data):
    assert "run.data.stream with job.objective=sft: only text for pretrain" in refusal(
        SpecError, kit.emit.run_directory.write, tiny.plan(job={"objective": "sft"}), RunSpec(data=data), "/nowhere"
    )


def test_megatron_lm_cannot_stream(tmp_path, data):
    megatron = ["layout.engine=megatron", "layout.zero_stage=1", "layout.tp=1", "layout.pp=1"]
    rundir = started.emit(RECIPE, tmp_path / "run", [*words(data), *megatron])
    environment = os.environ | {"MEGATRON_LM": "/nowhere", "PYTHON": "echo"}
    for arguments, code in (((), 2), (("--data-path", "x"), 0)):
        command = [str(rundir.path / "pretrain_gpt.sh"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == code
        assert ("Megatron-LM reads .bin/.idx pairs only" in done.stderr) == bool(code)
