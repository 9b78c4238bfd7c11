"""Exchange checkpoints: exactness, layouts, damage, full disks, and the Hugging Face model that comes out."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kit.engines.base import StateKind
from kit.engines.huggingface.buffers import is_buffer
from kit.engines.torch.engine import TorchEngine
from kit.errors import CheckpointError
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.checkpoint.files import record_of, sealed
from kit.training.checkpoint.to_huggingface import exchange_to_hf
from kit.training.checkpoint.transfer import export_exchange, import_exchange
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.batches import micro_batches
from tests.training.disk import full_disk


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
        for kind in (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
            ours, theirs = cases.state(engine, kind), cases.state(fresh, kind)
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    def test_before_the_first_step(self, one_process, tmp_path):
        rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model("gpt2")))
        engine = TorchEngine(rundir)
        export_exchange(engine, tmp_path / "exchange", cases.COUNTERS, model=rundir.plan.model)
        source = ExchangeCheckpoint(tmp_path / "exchange").source(StateKind.EXP_AVG)
        assert not any(source.read(name).any() for name in source.names())
        assert "lm_head.weight" not in source.names()

    @pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
    def test_across_world_sizes(self, tmp_path, before, after):
        def rundir(dp):
            layout = {"dp": dp, "micro_batch_size": 2, "gradient_accumulation_steps": 4 // dp}
            return tiny.run_directory(tmp_path / "run", tiny.plan(**layout))

        exchange = tmp_path / "exchange"
        exported = pool("torch", before).run(cases.train_and_export, rundir(before), exchange)[0]
        resumed = pool("torch", after).run(cases.import_and_train, rundir(after), exchange)[0]
        assert resumed["counters"] == cases.COUNTERS
        assert resumed["evaluated"].mean == pytest.approx(exported["evaluated"].mean, rel=1e-6)
        assert torch.tensor(resumed["after"]).allclose(torch.tensor(exported["after"]), rtol=1e-5)


class TestDamage:
    """Every kind of damage is named before anything is loaded."""

    def refused(self, exported, message):
        rundir, _, exchange = exported
        fresh = TorchEngine(rundir)
        before = cases.state(fresh, StateKind.MASTER)
        with pytest.raises(CheckpointError, match=message):
            import_exchange(fresh, exchange)
        after = cases.state(fresh, StateKind.MASTER)
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_missing_file(self, exported):
        (exported[2] / "exp_avg-00002.safetensors").unlink()
        self.refused(exported, r"exp_avg-00002\.safetensors is missing")

    def test_truncated_file(self, exported):
        path = exported[2] / "master-00001.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        self.refused(exported, r"master-00001\.safetensors has \d+ bytes where \d+ were written")

    def test_corrupted_file(self, exported):
        path = exported[2] / "exp_avg_sq-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        self.refused(exported, r"exp_avg_sq-00001\.safetensors is corrupted")

    def test_no_json(self, exported):
        (exported[2] / "exchange.json").unlink()
        self.refused(exported, r"is not an exchange checkpoint \(no readable exchange\.json")

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("format", "other", "format is not 'kit-exchange'"),
            ("version", 1, "has version 1, this kit reads 3"),
            ("counters", {"step": 1}, "counters.samples_seen: is required and missing"),
            ("model", {"name": "x"}, r"exchange\.json is damaged"),
            ("files", {}, "should have at least 1 item"),
            ("files", {"a": {"bytes": 1, "xxh3_128": "0" * 32}}, r"has no hash of exp_avg-00001\.safetensors"),
            ("files", {"../outside": {"bytes": 1, "xxh3_128": "0" * 32}}, "is outside the checkpoint"),
            ("weight_map", {}, "has no master"),
        ],
    )
    def test_foreign_json(self, exported, key, value, message):
        path = exported[2] / "exchange.json"
        path.write_text(json.dumps(sealed(json.loads(path.read_text()) | {key: value})))
        self.refused(exported, message)

    def test_truncated_json(self, exported):
        path = exported[2] / "exchange.json"
        path.write_text(path.read_text()[:-20])
        self.refused(exported, r"exchange\.json is damaged")

    def rewrite(self, exchange: Path, change):
        """Change the tensors of master's first shard, with a manifest that agrees."""
        path, index = exchange / "master-00001.safetensors", json.loads((exchange / "exchange.json").read_text())
        tensors = change(load_file(path))
        save_file(tensors, path)
        record = record_of(path)
        index["files"][path.name] = {"bytes": record.bytes, "xxh3_128": record.xxh3_128}
        kept = {n: f for n, f in index["weight_map"]["master"].items() if f != path.name}
        index["weight_map"]["master"] = kept | dict.fromkeys(tensors, path.name)
        (exchange / "exchange.json").write_text(json.dumps(sealed(index)))

    def test_missing_name(self, exported):
        self.rewrite(exported[2], lambda tensors: dict(list(tensors.items())[1:]))
        self.refused(exported, "1 tensors of the model are missing from the checkpoint, first ")

    def test_foreign_name(self, exported):
        self.rewrite(exported[2], lambda tensors: tensors | {"model.spare": torch.zeros(1)})
        self.refused(exported, r"first model\.spare")

    def test_wrong_shape(self, exported):
        self.rewrite(exported[2], lambda tensors: {name: tensor[:1].clone() for name, tensor in tensors.items()})
        self.refused(exported, r"has shape \[1.*\] in the checkpoint")

    def test_another_model(self, exported, tmp_path):
        _, _, exchange = exported
        other = TorchEngine(tiny.run_directory(tmp_path / "other", tiny.plan(tiny.model(num_layers=3))))
        with pytest.raises(CheckpointError, match=r"missing from the checkpoint, first model\.layers\.2"):
            import_exchange(other, exchange)


class TestWriting:
    def test_an_existing_checkpoint_is_not_overwritten(self, exported):
        rundir, engine, exchange = exported
        before = record_of(exchange / "master-00001.safetensors")
        cases.steps(engine, rundir, 3, 1)
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            export_exchange(engine, exchange, cases.COUNTERS, model=rundir.plan.model)
        assert record_of(exchange / "master-00001.safetensors") == before

    def test_what_a_killed_export_left_is_replaced(self, exported):
        rundir, engine, exchange = exported
        shutil.rmtree(exchange)
        leftover = exchange.with_name(f".{exchange.name}.partial")
        leftover.mkdir()
        (leftover / "master-00001.safetensors").write_bytes(b"half")
        export_exchange(engine, exchange, cases.COUNTERS, model=rundir.plan.model)
        ExchangeCheckpoint(exchange).verify()
        assert not leftover.exists()

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
    @pytest.mark.parametrize(
        "family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3"]
    )
    def test_logits_are_those_of_the_engine(self, one_process, tmp_path, family):
        rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model(family)))
        engine = TorchEngine(rundir)
        for name, buffer in engine._model.named_buffers():
            if is_buffer(name):
                buffer.normal_()  # other experts are chosen than without it
        cases.steps(engine, rundir, 0, 2)
        export_exchange(engine, tmp_path / "exchange", cases.COUNTERS, model=rundir.plan.model)
        exchange_to_hf(tmp_path / "exchange", tmp_path / "hf", dtype="float32", shard_bytes=30_000)
        assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
        assert model.dtype is torch.float32
        (batch,) = micro_batches(9, mbs=2, accumulation=1)
        with torch.no_grad():
            assert torch.equal(model(batch.input_ids).logits, engine._model.eval()(batch.input_ids).logits)

    def test_bfloat16_in_one_file(self, exported, tmp_path):
        _, engine, exchange = exported
        exchange_to_hf(exchange, tmp_path / "hf")
        assert (tmp_path / "hf" / "model.safetensors").is_file()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
        assert model.dtype is torch.bfloat16
        master = cases.state(engine, StateKind.MASTER)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, master[name].bfloat16()), name

    def test_shards_are_numbered_filled_and_summed(self, exported, tmp_path):
        """As save_pretrained writes them: what loads a model by its index or its files finds the same."""
        exchange_to_hf(exported[2], tmp_path / "hf", shard_bytes=10_000)
        files = sorted(tmp_path.glob("hf/*.safetensors"))
        assert len(files) > 2
        assert [path.name for path in files] == [
            f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
        ]
        sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in files]
        assert all(one + next_one > 10_000 for one, next_one in pairwise(sizes)), "two would fit into one"
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes)

    def test_tokenizer_and_special_tokens_come_along(self, exported, tmp_path):
        source = tmp_path / "source"
        source.mkdir()
        (source / "config.json").write_text('{"eos_token_id": [5, 6], "bos_token_id": 0, "pad_token_id": null}')
        (source / "tokenizer.json").write_text("{}")
        (source / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
        (source / "secret.txt").write_text("not part of a model")
        exchange_to_hf(exported[2], tmp_path / "hf", extras_from=source)
        names = {path.name for path in (tmp_path / "hf").iterdir()}
        assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
        assert (model.config.eos_token_id, model.config.bos_token_id) == ([5, 6], 0)
        assert model.generation_config.temperature == 0.5

    def test_an_existing_directory_is_not_overwritten(self, exported, tmp_path):
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "precious").write_text("mine")
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            exchange_to_hf(exported[2], tmp_path / "hf")
        assert [path.name for path in (tmp_path / "hf").iterdir()] == ["precious"]

    def test_an_empty_directory_is_filled(self, exported, tmp_path):
        (tmp_path / "hf").mkdir()
        exchange_to_hf(exported[2], tmp_path / "hf")
        assert (tmp_path / "hf" / "config.json").is_file()

    def test_unknown_dtype_and_damaged_checkpoint(self, exported, tmp_path):
        with pytest.raises(CheckpointError, match="dtype 'fp8' is unknown; use one of float32"):
            exchange_to_hf(exported[2], tmp_path / "hf", dtype="fp8")
        (exported[2] / "master-00001.safetensors").unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            exchange_to_hf(exported[2], tmp_path / "hf")
        assert not (tmp_path / "hf").exists()


def test_buffers_stay_in_fp32_whatever_the_dtype(one_process, tmp_path):
    """DeepSeek's router correction: rounded to bfloat16 it would choose other experts."""
    rundir = tiny.run_directory(tmp_path / "run", tiny.plan(tiny.model("deepseek_v3")))
    engine = TorchEngine(rundir)
    export_exchange(engine, tmp_path / "exchange", cases.COUNTERS, model=rundir.plan.model)
    exchange_to_hf(tmp_path / "exchange", tmp_path / "hf", dtype="bfloat16", shard_bytes=30_000)
    tensors = {n: t for path in tmp_path.glob("hf/*.safetensors") for n, t in load_file(path).items()}
    assert {tensor.dtype for name, tensor in tensors.items() if is_buffer(name)} == {torch.float32}
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


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
    for kind in (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
        assert all(
            torch.equal(found.source(kind).read(name), expected.source(kind).read(name))
            for name in expected.source(kind).names()
        )
