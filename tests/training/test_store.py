"""A checkpoint: exactness, layouts, damage, full disks, and the Hugging Face model that comes out."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from transformers import AutoModelForCausalLM

from kit.engines.huggingface.buffers import is_buffer
from kit.engines.protocol import StateKind
from kit.engines.torch.engine import TorchEngine
from kit.errors import CheckpointError
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.files import record_of, with_checksum
from kit.training.checkpoint.formats import open_step
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.checkpoint.to_huggingface import opened_to_hf
from kit.training.counters import START, Counters
from tests.support import tiny
from tests.support.checkpoints import export, load, same_state
from tests.support.files import files_in
from tests.support.hostile import spoil
from tests.support.refusals import refusal
from tests.support.workers import pool
from tests.training import cases
from tests.training.batches import micro_batches
from tests.training.disk import full_disk

SHARD = "model-00001-of-00007.safetensors"
MASTER = f"model/{SHARD}"


@pytest.fixture
def exported(one_process, tmp_path):
    """(run directory, engine after three steps, its checkpoint in many small shards)."""
    rundir = tiny.run_directory(tmp_path / "run")
    engine = TorchEngine(rundir)
    cases.steps(engine, rundir, 0, 3)
    step = tmp_path / "step"
    export(engine, step, rundir.plan, cases.COUNTERS, shard_bytes=20_000)
    return rundir, engine, step


# Round trip


def test_before_the_first_step(one_process, tmp_path):
    rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model("gpt2")))
    export(TorchEngine(rundir), tmp_path / "step", rundir.plan, START)
    source = Checkpoint(tmp_path / "step").source(StateKind.EXP_AVG)
    assert not any(source.read(name).any() for name in source.names())
    assert "lm_head.weight" not in source.names()


def rewritten(change):
    """The tensors of the first shard of weights, with a manifest that agrees."""

    def damage(step: Path) -> None:
        path, said = step / MASTER, json.loads((step / "manifest.json").read_text())
        tensors = change(load_file(path))
        save_file(tensors, path)
        said["files"][MASTER] = dataclasses.asdict(record_of(path))
        kept = {name: file for name, file in said["weight_map"].items() if file != SHARD}
        said["weight_map"] = kept | dict.fromkeys(tensors, SHARD)
        (step / "manifest.json").write_text(json.dumps(with_checksum(said)))

    return damage


DAMAGE = {
    "a file is missing": (lambda step: (step / MASTER).unlink(), r"model-00001-of-00007\.safetensors is missing"),
    "no moments of a run that has stepped": (
        lambda step: spoil(step / "manifest.json", ("kinds",), ["master"], with_checksum),
        "has no exp_avg: it was written without the optimizer's state",
    ),
    "a name less": (
        rewritten(lambda tensors: dict(list(tensors.items())[1:])), "1 tensors of the model are missing from the check"
    ),
    "a name more": (rewritten(lambda t: t | {"model.spare": torch.zeros(1)}), r"first model\.spare"),
    "another shape": (rewritten(lambda t: {n: v[:1].clone() for n, v in t.items()}), r"has shape \[1.*\] in the check"),
}  # fmt: skip
"""Bytes that are lost, changed or swapped: test_damage.py, on every engine. Another optimizer: test_resume.py."""


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_before_anything_is_loaded(exported, damage, message):
    rundir, _, step = exported
    damage(step)
    fresh = TorchEngine(rundir)
    before = cases.own(fresh)
    assert re.search(message, refusal(CheckpointError, load, fresh, step, rundir.plan))
    assert cases.same(cases.own(fresh), before)


# Writing


def test_torchs_own_reader_and_transformers_read_the_weights(exported, tmp_path):
    """While the run goes on: bit for bit, and after torch's consolidation."""
    engine, weights = exported[1], exported[2] / "model"
    masters = cases.state(engine, StateKind.MASTER)
    found = {name: torch.zeros_like(tensor) for name, tensor in masters.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(weights)), no_dist=True)
    assert cases.same(found, masters)
    (tmp_path / "one").mkdir()
    consolidate_safetensors_files(str(weights), str(tmp_path / "one"), dict.fromkeys(masters, 1))
    shutil.copy(weights / "config.json", tmp_path / "one")
    for directory in (weights, tmp_path / "one"):
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
        assert cases.same(dict(model.named_parameters()), masters)


@pytest.mark.everyday("20000-2")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("limit", [1_000, 20_000])
def test_a_full_disk_is_an_error_on_every_rank(tmp_path, world_size, limit):
    """20,000 bytes hold the embedding, the first shard, and not the first MLP's gate."""
    layout = {"dp": world_size, "micro_batch_size": 1}
    rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model(ffn_hidden_size=256), **layout))
    messages = pool("torch", world_size).run(export_to_a_full_disk, rundir, tmp_path / "step", limit)
    assert all("writing the checkpoint" in message for message in messages)
    assert all("check the free space" in message for message in messages)


def export_to_a_full_disk(rundir, step, limit):
    """The message of the error that every rank must raise."""
    engine = TorchEngine(rundir)
    with full_disk(limit):
        return refusal(CheckpointError, export, engine, step, rundir.plan, cases.COUNTERS, shard_bytes=20_000)


# Hugging face


@pytest.mark.everyday("deepseek_v3", "phi3")
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3"]
)
def test_logits_are_those_of_the_engine(one_process, tmp_path, family):
    """In shards that are filled, numbered and summed as save_pretrained's; buffers are fp32 whatever the dtype:
    DeepSeek's router correction, rounded to bfloat16, would choose other experts."""
    rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model(family)))
    engine = TorchEngine(rundir)
    for name, buffer in engine._model.named_buffers():
        if is_buffer(name):
            buffer.normal_()  # other experts are chosen than without it
    cases.steps(engine, rundir, 0, 2)
    export(engine, tmp_path / "step", rundir.plan, cases.COUNTERS)
    for dtype, limit in (("float32", 30_000), ("bfloat16", 15_000)):
        out = tmp_path / dtype
        opened_to_hf(open_step(tmp_path / "step"), out, dtype=dtype, shard_bytes=limit)
        files = sorted(out.glob("*.safetensors"))
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        assert [path.name for path in files] == names
        shards = [load_file(path) for path in files]
        sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]
        assert all(one + next_one > limit for one, next_one in pairwise(sizes)), "two would fit into one"
        assert all(size <= limit or len(shard) == 1 for size, shard in zip(sizes, shards, strict=True))
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes)
        tensors = {name: tensor.dtype for shard in shards for name, tensor in shard.items()}
        assert tensors == {n: torch.float32 if is_buffer(n) else getattr(torch, dtype) for n in tensors}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", local_files_only=True)
    (batch,) = micro_batches(9, mbs=2, accumulation=1)
    with torch.no_grad():
        assert torch.equal(model(batch.input_ids).logits, engine._model.eval()(batch.input_ids).logits)


def test_bfloat16_in_one_file_of_an_empty_directory(exported, tmp_path):
    """Tokenizer and special tokens come along; nothing else does, and no file of somebody's is written over."""
    source = files_in(tmp_path / "source", {
        "config.json": '{"eos_token_id": [5, 6], "bos_token_id": 0, "pad_token_id": null}',
        "tokenizer.json": "{}",
        "generation_config.json": '{"temperature": 0.5, "do_sample": true}',
        "secret.txt": "not part of a model",
    })  # fmt: skip
    (tmp_path / "hf").mkdir()
    opened_to_hf(open_step(exported[2]), tmp_path / "hf", extras_from=source)
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    master = cases.state(exported[1], StateKind.MASTER)
    assert cases.same(dict(model.named_parameters()), {name: each.bfloat16() for name, each in master.items()})
    config = model.config  # servers choose their code by the architecture
    assert (config.eos_token_id, config.bos_token_id, config.architectures) == ([5, 6], 0, ["LlamaForCausalLM"])
    assert model.generation_config.temperature == 0.5
    assert "exists and is not empty" in refusal(CheckpointError, lambda: opened_to_hf(open_step(exported[2]), source))
    assert len(list(source.iterdir())) == 4


def test_unknown_dtype_and_damaged_checkpoint(exported, tmp_path):
    assert "dtype 'fp8' is unknown; use one of float32" in refusal(
        CheckpointError, convert, exported[2], "hf", tmp_path / "hf", dtype="fp8"
    )
    (exported[2] / MASTER).unlink()
    assert "is missing" in refusal(CheckpointError, lambda: opened_to_hf(open_step(exported[2]), tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()


def test_a_megatron_checkpoint_has_fp32_state_and_adams_own_count(exported, tmp_path):
    """Weights alone are in the dtype that was asked for; a step that was skipped is none of Adam's."""

    rundir, engine, _ = exported
    counters = Counters(step=5, samples_seen=20, tokens_seen=640, optimizer_steps=3, samples_skipped=0)
    export(engine, tmp_path / "skipped", rundir.plan, counters)
    convert(tmp_path / "skipped", "megatron", tmp_path / "megatron", dtype="bfloat16")
    assert load(engine, tmp_path / "skipped", rundir.plan).step == 5
    assert engine.optimizer_steps == 3
    opened_to_hf(open_step(tmp_path / "skipped"), tmp_path / "hf", dtype="float32")
    convert(tmp_path / "megatron", "step", tmp_path / "back", model=str(tmp_path / "hf"))
    found, expected = Checkpoint(tmp_path / "back"), Checkpoint(tmp_path / "skipped")
    assert (found.manifest.counters.step, found.manifest.counters.optimizer_steps) == (5, 3)
    assert found.manifest.kinds == cases.KINDS
    assert same_state(found, expected)
