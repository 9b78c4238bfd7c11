"""Exchange checkpoints: exactness, layouts, damage, full disks, and the Hugging Face model that comes out."""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kit.engines.huggingface.buffers import is_buffer
from kit.engines.protocol import StateKind
from kit.engines.torch.engine import TorchEngine
from kit.errors import CheckpointError
from kit.specs.job import OptimizerSpec
from kit.training.checkpoint.counters import START, Counters
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.checkpoint.files import record_of, sealed
from kit.training.checkpoint.to_huggingface import exchange_to_hf
from kit.training.checkpoint.transfer import export_exchange, import_exchange
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.batches import micro_batches
from tests.training.disk import full_disk

MASTER = "master-00001.safetensors"


@pytest.fixture
def exported(one_process, tmp_path):
    """(run directory, engine after three steps, its exchange checkpoint in many small shards)."""
    rundir = tiny.run_directory(tmp_path / "run")
    engine = TorchEngine(rundir)
    cases.steps(engine, rundir, 0, 3)
    exchange = tmp_path / "exchange"
    export_exchange(engine, exchange, cases.COUNTERS, model=rundir.plan.model, shard_bytes=20_000)
    return rundir, engine, exchange


class TestRoundTrip:
    def test_next_steps_are_bitwise_the_same(self, exported):
        rundir, engine, exchange = exported
        assert len(list(exchange.glob("master-*.safetensors"))) > 2
        fresh = TorchEngine(tiny.run_directory(rundir.path, rundir.plan, seed=1))  # other weights before the import
        assert import_exchange(fresh, exchange) == cases.COUNTERS
        assert fresh.optimizer_steps == 3
        assert cases.steps(fresh, rundir, 3, 3) == cases.steps(engine, rundir, 3, 3)
        assert cases.same(cases.own(engine), cases.own(fresh))

    def test_before_the_first_step(self, one_process, tmp_path):
        rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model("gpt2")))
        export_exchange(TorchEngine(rundir), tmp_path / "exchange", START, model=rundir.plan.model)
        source = ExchangeCheckpoint(tmp_path / "exchange").source(StateKind.EXP_AVG)
        assert not any(source.read(name).any() for name in source.names())
        assert "lm_head.weight" not in source.names()


def rewritten(change):
    """The tensors of master's first shard, with a manifest that agrees."""

    def damage(exchange: Path) -> None:
        path, index = exchange / MASTER, json.loads((exchange / "exchange.json").read_text())
        tensors = change(load_file(path))
        save_file(tensors, path)
        index["files"][path.name] = dataclasses.asdict(record_of(path))
        kept = {n: f for n, f in index["weight_map"]["master"].items() if f != path.name}
        index["weight_map"]["master"] = kept | dict.fromkeys(tensors, path.name)
        (exchange / "exchange.json").write_text(json.dumps(sealed(index)))

    return damage


def without_moments(exchange: Path) -> None:
    """Of a run that has stepped."""
    index = json.loads((exchange / "exchange.json").read_text())
    del index["weight_map"]["exp_avg"]
    (exchange / "exchange.json").write_text(json.dumps(sealed(index)))


def bytes_of(name, change):
    """Other bytes in a file."""
    return lambda exchange: (exchange / name).write_bytes(change((exchange / name).read_bytes()))


DAMAGE = {
    "a file is missing": (lambda e: (e / MASTER).unlink(), r"master-00001\.safetensors is missing"),
    "a file is cut": (bytes_of(MASTER, lambda data: data[:-1]), r"master-0.* has \d+ bytes where \d+ were written"),
    "a bit is flipped": (
        bytes_of("exp_avg_sq-00001.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        r"exp_avg_sq-00001\.safetensors is corrupted",
    ),
    "no index": (lambda e: (e / "exchange.json").unlink(), "is not an exchange checkpoint"),
    "the index is cut": (bytes_of("exchange.json", lambda data: data[:-20]), r"exchange\.json is damaged"),
    "no moments": (without_moments, "has no exp_avg; export the run again"),
    "a name less": (
        rewritten(lambda tensors: dict(list(tensors.items())[1:])), "1 tensors of the model are missing from the check"
    ),
    "a name more": (rewritten(lambda t: t | {"model.spare": torch.zeros(1)}), r"first model\.spare"),
    "another shape": (rewritten(lambda t: {n: v[:1].clone() for n, v in t.items()}), r"has shape \[1.*\] in the check"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_before_anything_is_loaded(exported, damage, message):
    rundir, _, exchange = exported
    damage(exchange)
    fresh = TorchEngine(rundir)
    before = cases.own(fresh)
    with pytest.raises(CheckpointError, match=message):
        import_exchange(fresh, exchange)
    assert cases.same(cases.own(fresh), before)


def test_another_model_and_another_optimizer_are_refused(exported, tmp_path):
    deeper = TorchEngine(tiny.run_directory(tmp_path / "deeper", tiny.plan(tiny.model(num_layers=3))))
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint, first model\.layers\.2"):
        import_exchange(deeper, exported[2])
    lion = tiny.plan(job={"optimizer": OptimizerSpec(name="lion")})
    with pytest.raises(CheckpointError, match=r"state of optimizer.name=adamw, and this run has optimizer.name=lion"):
        import_exchange(TorchEngine(tiny.run_directory(tmp_path / "lion", lion)), exported[2])


class TestWriting:
    def test_an_existing_checkpoint_is_not_overwritten(self, exported):
        rundir, engine, exchange = exported
        before = record_of(exchange / MASTER)
        cases.steps(engine, rundir, 3, 1)
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            export_exchange(engine, exchange, cases.COUNTERS, model=rundir.plan.model)
        assert record_of(exchange / MASTER) == before

    def test_what_a_killed_export_left_is_replaced(self, exported):
        rundir, engine, exchange = exported
        shutil.rmtree(exchange)
        leftover = exchange.with_name(f".{exchange.name}.partial")
        leftover.mkdir()
        (leftover / MASTER).write_bytes(b"half")
        export_exchange(engine, exchange, cases.COUNTERS, model=rundir.plan.model)
        ExchangeCheckpoint(exchange).verify()
        assert not leftover.exists()

    @pytest.mark.everyday("20000-2")
    @pytest.mark.parametrize("world_size", [1, 2])
    @pytest.mark.parametrize("limit", [1_000, 20_000])
    def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(self, tmp_path, world_size, limit):
        """20,000 bytes hold the embedding, the first shard, and not the first MLP's gate."""
        layout = {"dp": world_size, "micro_batch_size": 1}
        rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model(ffn_hidden_size=256), **layout))
        messages = pool("torch", world_size).run(export_to_a_full_disk, rundir, tmp_path / "exchange", limit)
        assert all("writing the exchange checkpoint" in message for message in messages)
        assert all("check the free space" in message for message in messages)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def export_to_a_full_disk(rundir, exchange, limit):
    """The message of the error that every rank must raise."""
    engine = TorchEngine(rundir)
    try:
        with full_disk(limit):
            export_exchange(engine, exchange, cases.COUNTERS, model=rundir.plan.model, shard_bytes=20_000)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("the export succeeded")


class TestHuggingFace:
    @pytest.mark.everyday("deepseek_v3", "phi3")
    @pytest.mark.parametrize(
        "family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3"]
    )
    def test_logits_are_those_of_the_engine(self, one_process, tmp_path, family):
        """In shards that are filled, numbered and summed as save_pretrained's; buffers are fp32 whatever the dtype:
        DeepSeek's router correction, rounded to bfloat16, would choose other experts."""
        rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model(family)))
        engine = TorchEngine(rundir)
        for name, buffer in engine._model.named_buffers():
            if is_buffer(name):
                buffer.normal_()  # other experts are chosen than without it
        cases.steps(engine, rundir, 0, 2)
        export_exchange(engine, tmp_path / "exchange", cases.COUNTERS, model=rundir.plan.model)
        for dtype, limit in (("float32", 30_000), ("bfloat16", 15_000)):
            out = tmp_path / dtype
            exchange_to_hf(tmp_path / "exchange", out, dtype=dtype, shard_bytes=limit)
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

    def test_bfloat16_in_one_file_of_an_empty_directory(self, exported, tmp_path):
        """Tokenizer and special tokens come along; nothing else does, and no file of somebody's is written over."""
        source = tmp_path / "source"
        source.mkdir()
        for name, text in {
            "config.json": '{"eos_token_id": [5, 6], "bos_token_id": 0, "pad_token_id": null}',
            "tokenizer.json": "{}",
            "generation_config.json": '{"temperature": 0.5, "do_sample": true}',
            "secret.txt": "not part of a model",
        }.items():
            (source / name).write_text(text)
        (tmp_path / "hf").mkdir()
        exchange_to_hf(exported[2], tmp_path / "hf", extras_from=source)
        names = {path.name for path in (tmp_path / "hf").iterdir()}
        assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
        master = cases.state(exported[1], StateKind.MASTER)
        assert cases.same(dict(model.named_parameters()), {name: each.bfloat16() for name, each in master.items()})
        config = model.config  # servers choose their code by the architecture
        assert (config.eos_token_id, config.bos_token_id, config.architectures) == ([5, 6], 0, ["LlamaForCausalLM"])
        assert model.generation_config.temperature == 0.5
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            exchange_to_hf(exported[2], source)
        assert len(list(source.iterdir())) == 4

    def test_unknown_dtype_and_damaged_checkpoint(self, exported, tmp_path):
        with pytest.raises(CheckpointError, match="dtype 'fp8' is unknown; use one of float32"):
            exchange_to_hf(exported[2], tmp_path / "hf", dtype="fp8")
        (exported[2] / MASTER).unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            exchange_to_hf(exported[2], tmp_path / "hf")
        assert not (tmp_path / "hf").exists()


def test_a_megatron_checkpoint_has_fp32_state_and_adams_own_count(exported, tmp_path):
    """Weights alone are in the dtype that was asked for; a step that was skipped is none of Adam's."""
    from kit.training.checkpoint.convert import convert

    rundir, engine, _ = exported
    counters = Counters(step=5, samples_seen=20, tokens_seen=640, optimizer_steps=3, samples_skipped=0)
    export_exchange(engine, tmp_path / "skipped", counters, model=rundir.plan.model)
    convert(tmp_path / "skipped", "megatron", tmp_path / "megatron", dtype="bfloat16")
    assert import_exchange(engine, tmp_path / "skipped").step == 5
    assert engine.optimizer_steps == 3
    exchange_to_hf(tmp_path / "skipped", tmp_path / "hf", dtype="float32")
    convert(tmp_path / "megatron", "exchange", tmp_path / "back", model=str(tmp_path / "hf"))
    found, expected = ExchangeCheckpoint(tmp_path / "back"), ExchangeCheckpoint(tmp_path / "skipped")
    assert (found.counters.step, found.counters.optimizer_steps) == (5, 3)
    for kind in cases.KINDS:
        pairs = ({name: of.source(kind).read(name) for name in of.source(kind).names()} for of in (found, expected))
        assert cases.same(*pairs)
