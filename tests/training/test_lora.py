"""Adapters on a frozen model: what peft computes, on every layout; exchange and native checkpoints, export."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.cost.memory.peak import parts_of
from kit.cost.workload import Workload
from kit.emit.deepspeed import ds_config
from kit.emit.megatron import megatron_settings
from kit.engines.base import IGNORE_INDEX, StateKind
from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.adapters import MAGNITUDE, InitialAdapters, adapter_shapes, peft_config
from kit.engines.huggingface.models import build_model
from kit.errors import EngineError
from kit.specs.job import LoraSpec, OptimizerSpec
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.checkpoint.to_huggingface import exchange_to_hf
from kit.training.checkpoint.transfer import export_exchange, import_exchange
from tests.support import tiny
from tests.support.peak_memory import Peak, return_freed_memory
from tests.support.workers import pool
from tests.training.batches import micro_batches, sample

LORA = LoraSpec(rank=4, alpha=16)
LISTED = LoraSpec(rank=2, alpha=4, target_modules=("q_proj", "k_proj", "v_proj", "down_proj"))
PATTERNS = LoraSpec(rank=4, alpha=16, use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"up_proj": 5.0})
DORA = LoraSpec(rank=4, alpha=16, use_dora=True, rank_pattern={"q_proj": 2})
JOB: dict[str, Any] = {"optimizer": OptimizerSpec(eps=1e-3), "grad_clip": 0.5}


def build(rundir: tiny.TinyRunDirectory) -> Any:
    """The plan's engine."""
    if rundir.plan.layout.engine == "torch":
        from kit.engines.torch.engine import TorchEngine

        return TorchEngine(rundir)
    if rundir.plan.layout.engine == "megatron":
        from kit.engines.megatron.engine import MegatronEngine

        return MegatronEngine(dataclasses.replace(rundir, settings=megatron_settings(rundir.plan)))
    from kit.engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(dataclasses.replace(rundir, settings=ds_config(rundir.plan)))


def step(engine: Any, rundir: tiny.TinyRunDirectory, number: int) -> Any:
    """Loss of a step, gradients still there."""
    layout = rundir.plan.layout
    sizes = {"mbs": layout.micro_batch_size, "accumulation": layout.gradient_accumulation_steps}
    return engine.forward_backward(micro_batches(number, **sizes, dp_rank=engine.dp_rank, dp_size=engine.dp_size))


def state(engine: Any, kind: StateKind) -> dict[str, torch.Tensor]:
    """All tensors of a kind, on the main rank."""
    return full_tensors(engine, kind)


def train(rundir: tiny.TinyRunDirectory, exchange: Path | None = None) -> dict[str, Any]:
    """Four steps; gradients of the second (in the first those of A are zero), and both kinds of checkpoint."""
    engine = build(rundir)
    result: dict[str, Any] = {"curve": []}
    native = rundir.path / "native"
    for number in range(4):
        loss = step(engine, rundir, number)
        if number == 1:
            result["gradients"] = state(engine, StateKind.GRADIENT)
        result["curve"].append((loss.mean, engine.apply(1e-2).gradient))
        if number == 1 and exchange is not None:
            native.mkdir(exist_ok=True)
            engine.save(native)
            copied = rundir.path / "copied"
            copied.mkdir(exist_ok=True)
            engine.snapshot()(copied, None)
            torch.distributed.barrier()
            saved, by_thread = (
                {path.name: path.stat().st_size for path in where.rglob("*") if path.suffix in (".pt", ".safetensors")}
                for where in (native, copied)
            )
            assert by_thread.keys() == saved.keys()
            assert all(by_thread[name] < 1.3 * size for name, size in saved.items()), "with the frozen model"
            counters = Counters(2, 16, 0, engine.optimizer_steps, 0)
            export_exchange(engine, exchange, counters, model=rundir.plan.model, lora=rundir.plan.job.lora)
    result["held"] = engine.held_bytes()
    engine.close()
    if exchange is not None:
        again = build(rundir)
        again.load(native)
        result["native"] = [(step(again, rundir, n).mean, again.apply(1e-2).gradient) for n in (2, 3)]
        again.close()
    return result


def resume(rundir: tiny.TinyRunDirectory, exchange: Path) -> list[Any]:
    """The last two steps."""
    engine = build(rundir)
    import_exchange(engine, exchange)
    curve = [(step(engine, rundir, number).mean, engine.apply(1e-2).gradient) for number in (2, 3)]
    engine.close()
    return curve


def start(tmp_path: Path, family: Any = "llama") -> Path:
    """The model that is frozen."""
    plan = tiny.plan(tiny.model(family))
    build_model(tiny.run_directory(tmp_path / "seed", plan), torch.float32, "cpu").save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def directory(
    path: Path, hf: Path, engine: str, stage: int, lora: LoraSpec = LORA, family: Any = "llama", split="dp", **job: Any
):
    """Two processes, eight samples a step. ``split``: what the processes split."""
    layout = {"engine": engine, "zero_stage": stage, "dp": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    layout |= {"implementation": "local"} if engine == "megatron" else {}
    layout |= {"dp": 1, split: 2, "gradient_accumulation_steps": 4} if split in ("tp", "cp") else {}
    layout |= {"offload_param": "cpu", "offload_optimizer": "cpu"} if split == "offload" else {}
    layout |= {"cp_comm_type": "a2a"} if split == "cp" else {}
    plan = tiny.plan(tiny.model(family), job={**JOB, "lora": lora, **job}, **layout)
    return tiny.run_directory(path, plan, model_path=str(hf))


def reference(hf: Path, family: Any, lora: LoraSpec) -> tuple[list[float], dict[str, torch.Tensor]]:
    """peft alone, one process, the whole batch: losses of two steps, gradients of the second."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    shapes = adapter_shapes(tiny.model(family), lora)
    base = AutoModelForCausalLM.from_pretrained(hf, local_files_only=True, dtype=torch.float32)
    targets = {name.split(".")[-3] for name in shapes if not name.endswith(MAGNITUDE)}
    model = get_peft_model(base, peft_config(lora, sorted(targets)))
    initial = InitialAdapters(shapes, 7)
    given = {}
    for name, theirs in get_peft_model_state_dict(model).items():
        if name.endswith(MAGNITUDE):
            given[name] = theirs  # of the frozen weights alone
            continue
        given[name] = initial.read(name)
        assert given[name].std().item() == pytest.approx(theirs.std().item(), rel=0.4), name
    set_peft_model_state_dict(model, given)
    renamed = (
        (n.replace(".default", "").replace(f"{MAGNITUDE}.weight", MAGNITUDE), p) for n, p in model.named_parameters()
    )
    trained = {n: p for n, p in renamed if p.requires_grad}
    assert trained.keys() == shapes.keys()
    decayed = [p for p in trained.values() if p.ndim > 1]
    plain = {"params": [p for p in trained.values() if p.ndim == 1], "weight_decay": 0.0}
    groups = [{"params": decayed}, *([plain] if plain["params"] else [])]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    losses = []
    for number in range(2):
        rows = [sample(number * 8 + k) for k in range(8)]
        inputs, labels = (torch.stack(column) for column in zip(*rows, strict=True))
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        losses.append(loss.item())
        if number == 0:
            torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
            adam.step()
            adam.zero_grad()
    return losses, {name: p.grad for name, p in trained.items()}


@pytest.mark.everyday("llama-lora0-layouts0")
@pytest.mark.parametrize(
    ("family", "lora", "layouts"),
    [
        ("llama", LORA, [("torch", 0), ("torch", 3), ("megatron", 1), ("deepspeed", 2), ("deepspeed", 3)]),
        ("llama", LISTED, [("torch", 3), ("deepspeed", 2), ("megatron", 1)]),
        (
            "llama",
            LORA,
            [
                ("torch", 2, "tp"),
                ("torch", 3, "tp"),
                ("torch", 3, "offload"),
                ("torch", 3, "cp"),
                ("deepspeed", 2, "tp"),
                ("deepspeed", 3, "cp"),
                ("deepspeed", 2, "cp"),
            ],
        ),
        ("llama", DORA, [("torch", 0), ("torch", 3), ("deepspeed", 2), ("deepspeed", 1)]),
        ("gpt2", dataclasses.replace(DORA, rank_pattern={}), [("torch", 3), ("deepspeed", 2)]),
        ("llama", PATTERNS, [("torch", 3), ("deepspeed", 3), ("deepspeed", 1, "tp")]),
        ("qwen2", LoraSpec(rank=2, targets="attention"), [("deepspeed", 2, "tp"), ("torch", 3, "tp")]),
        ("gpt2", LoraSpec(rank=2, alpha=2, use_rslora=True, targets="attention"), [("torch", 2), ("deepspeed", 3)]),
    ],
)
def test_every_layout_trains_what_peft_trains(tmp_path, family, lora, layouts):
    hf = start(tmp_path, family)
    losses, gradients = reference(hf, family, lora)
    curves: dict[Path, Any] = {}
    for engine, stage, *split in layouts:
        place = tmp_path / "-".join(map(str, (engine, stage, *split)))
        rundir = directory(place, hf, engine, stage, lora, family, *split)
        found, other = pool(engine, 2).run(train, rundir, place / "exchange")
        assert [loss for loss, _ in found["curve"][:2]] == pytest.approx(losses, rel=1e-6)
        assert found["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (found["gradients"][name] - gradient).abs().max() / gradient.abs().max()
            assert error < 1e-5, (engine, stage, name)
        assert found["curve"] == other["curve"]
        assert np.allclose(found["native"], found["curve"][2:], rtol=1e-6)
        plan = rundir.plan
        states = parts_of(Workload(plan.model, plan.cluster, plan.job, plan.layout), 0).states
        if split == ["offload"]:
            assert states.weights == states.gradients == states.optimizer == 0
        else:
            assert found["held"]["optimizer"] == pytest.approx(states.optimizer, rel=0.001), (engine, stage)
        curves[place] = found["curve"]
    # From each exchange checkpoint the curve goes on under the next layout.
    for place, (after, after_stage, *split) in zip(curves, [*layouts[1:], layouts[0]], strict=True):
        exchange = place / "exchange"
        rundir = directory(tmp_path / "resumed", hf, after, after_stage, lora, family, *split)
        assert np.allclose(pool(after, 2).run(resume, rundir, exchange)[0], curves[place][2:], rtol=1e-5)
    check_exports(exchange, hf, tmp_path)


def check_exports(exchange: Path, hf: Path, tmp_path: Path) -> None:
    """peft loads the adapters; merged by peft and by kit, the model says the same, and not what it said before."""
    from peft import PeftModel

    exchange_to_hf(exchange, tmp_path / "peft", dtype="float32")
    exchange_to_hf(exchange, tmp_path / "merged", dtype="float32", merge_into=hf)
    # peft corrects it with a warning where it loads the adapters; others take it as it is.
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert written["fan_in_fan_out"] is ExchangeCheckpoint(exchange).model.traits.conv1d
    tokens = torch.arange(20).reshape(2, 10)
    base = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    before = base(tokens).logits.detach()
    adapted = PeftModel.from_pretrained(base, tmp_path / "peft")
    logits = adapted(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits - before).abs().max() > 1e-3
    torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapted.merge_and_unload()(tokens).logits, logits, rtol=1e-4, atol=1e-5)


def test_quantised_weights_agree_on_every_layout(tmp_path):
    hf = start(tmp_path)
    lora = dataclasses.replace(LORA, four_bit=True)
    alone = tiny.plan(tiny.model(), job={**JOB, "lora": lora}, micro_batch_size=2, gradient_accumulation_steps=4)
    (one,) = pool("torch", 1).run(train, tiny.run_directory(tmp_path / "one", alone, model_path=str(hf)))
    plain = pool("torch", 2).run(train, directory(tmp_path / "plain", hf, "torch", 0))[0]
    assert one["curve"][0][0] != pytest.approx(plain["curve"][0][0], rel=1e-6), "nf4 is not fp32"
    for engine, stage in [("torch", 0), ("torch", 3), ("deepspeed", 2), ("deepspeed", 3)]:
        rundir = directory(tmp_path / f"{engine}{stage}", hf, engine, stage, lora)
        found = pool(engine, 2).run(train, rundir)[0]
        assert np.allclose(found["curve"], one["curve"], rtol=1e-5), (engine, stage)
        for name, gradient in one["gradients"].items():
            error = (found["gradients"][name] - gradient).abs().max() / gradient.abs().max()
            assert error < 1e-5, (engine, stage, name)
        plan = rundir.plan
        states = parts_of(Workload(plan.model, plan.cluster, plan.job, plan.layout), 0).states
        assert found["held"]["optimizer"] == pytest.approx(states.optimizer, rel=0.001), (engine, stage)
        if (engine, stage) != ("deepspeed", 3):  # which never partitions tensors as small as these
            assert found["held"]["weights"] == pytest.approx(states.weights, rel=0.02), (engine, stage)


def test_only_adapters_have_gradients_and_moments(tmp_path):
    held = pool("torch", 2).run(train, directory(tmp_path / "x", start(tmp_path), "torch", 0))[0]["held"]
    adapters = sum(int(np.prod(shape)) for shape in adapter_shapes(tiny.model(), LORA).values())
    assert held["optimizer"] == 8 * adapters
    assert held["weights"] > 10 * adapters


def load_and_weigh(rundir: tiny.TinyRunDirectory) -> tuple[int, dict[str, int]]:
    """What building the engine grew by at most, and what it says it holds."""
    return_freed_memory()
    build(rundir).close()  # what is imported and cached the first time is not the model's
    with Peak() as peak:
        engine = build(rundir)
    held = engine.held_bytes()
    engine.close()
    return peak.grown, held


@pytest.mark.everyday("1")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_in_four_bits_is_never_whole(tmp_path, processes):
    """Weights are read and quantised one by one: beside what stays, a few copies of one. FSDP2 shards each layer before
    it reads the next. The plan knows what stays."""
    size = {"hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8}
    spec = tiny.model(num_layers=8, head_dim=64, **size)
    random = build_model(tiny.run_directory(tmp_path / "seed", tiny.plan(spec)), torch.bfloat16, "cpu")
    random.save_pretrained(tmp_path / "hf")
    whole, largest = sum(p.numel() for p in random.parameters()), 512 * 1536
    lora = dataclasses.replace(LORA, four_bit=True)
    layout = {"zero_stage": 3, "dp": 2} if processes == 2 else {}
    plan = tiny.plan(spec, job={**JOB, "lora": lora, "precision": "bf16"}, **layout)
    rundir = tiny.run_directory(tmp_path / "run", plan, model_path=str(tmp_path / "hf"))
    grown, held = pool("torch", processes).run(load_and_weigh, rundir)[0]
    assert grown < sum(held.values()) + 4 * 4 * largest
    assert grown < whole, "half of the model in 16 bits"
    weights = parts_of(Workload(spec, plan.cluster, plan.job, plan.layout), 0).states.weights
    assert held["weights"] == pytest.approx(weights, rel=0.01)


def test_weights_are_required(tmp_path):
    rundir = directory(tmp_path / "x", tmp_path, "torch", 0)
    rundir = dataclasses.replace(rundir, run=dataclasses.replace(rundir.run, model_path=None))
    with pytest.raises(AssertionError, match=r"job\.lora without run\.model_path") as raised:
        pool("torch", 2).run(train, rundir)
    assert EngineError.__name__ in str(raised.value)
