"""Adapters on a frozen model: what peft computes, on every layout; checkpoints, export."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.torch_version import TorchVersion
from transformers import AutoModelForCausalLM

from kit.addons.probe.tracker import LiveBytes
from kit.cost.memory.peak import parts_of
from kit.engines.huggingface.adapters import MAGNITUDE, InitialAdapters, adapter_shapes, peft_config, target_modules
from kit.engines.huggingface.models import build_skeleton
from kit.errors import EngineError
from kit.specs.job import LoraSpec, OptimizerSpec
from kit.training.checkpoint.formats import open_step
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.checkpoint.to_huggingface import opened_to_hf
from tests.deepspeed import plain
from tests.support import tiny
from tests.support.peak_memory import Peak, return_freed_memory
from tests.support.plain_adamw import trained
from tests.support.refusals import refusal
from tests.support.workers import pool
from tests.training import cases

PLAIN = LoraSpec(rank=4, alpha=16)
ADAPTERS = {
    "plain": PLAIN,
    "listed": LoraSpec(rank=2, alpha=4, target_modules=("q_proj", "k_proj", "v_proj", "down_proj")),
    "patterns": LoraSpec(rank=4, alpha=16, use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"up_proj": 5.0}),
    "dora": LoraSpec(rank=4, alpha=16, use_dora=True, rank_pattern={"q_proj": 2}),
    "even-dora": LoraSpec(rank=4, alpha=16, use_dora=True),
    "attention": LoraSpec(rank=2, targets="attention"),
    "rs-attention": LoraSpec(rank=2, alpha=2, use_rslora=True, targets="attention"),
}
JOB: dict[str, Any] = {"optimizer": OptimizerSpec(eps=1e-3), "grad_clip": 0.5}
ROWS = (1e-2, cases.batches, 1)
"""``cases.train`` with the gradients of the second step: in the first those of A are zero."""


def directory(path: Path, model_path: str | None, words: str, spec: Any = None, **job: Any) -> tiny.TinyRunDirectory:
    """Two processes, eight samples a step. ``words``: engine, ZeRO stage, what the processes split."""
    engine, stage, split = words.split()
    layout = {
        "engine": engine, "zero_stage": int(stage), "dp": 2, "gradient_accumulation_steps": 2,
        **({"implementation": "local"} if engine == "megatron" else {}),
        **({"dp": 1, split: 2, "gradient_accumulation_steps": 4} if split in ("tp", "cp") else {}),
        **({"offload_param": "cpu", "offload_optimizer": "cpu"} if split == "offload" else {}),
        **({"cp_comm_type": "a2a"} if split == "cp" else {}),
    }  # fmt: skip
    return tiny.run_directory(path, tiny.plan(spec, job={**JOB, **job}, **layout), model_path=model_path)


def reference(hf: str, family: Any, lora: LoraSpec) -> tuple[list[float], dict[str, torch.Tensor]]:
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
    parameters = {n: p for n, p in renamed if p.requires_grad}
    assert parameters.keys() == shapes.keys()
    losses, _, gradients = trained(
        parameters,
        2,
        backward=functools.partial(plain.backward, model),
        clip=lambda: float(torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)),
        rate=lambda step: 1e-2,
        build=functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1),
        of_step=1,
    )
    return losses, gradients


@pytest.mark.everyday(
    "qwen2 attention torch 3 tp",
    "gpt2 even-dora deepspeed 2 dp",
    "llama patterns deepspeed 3 dp",
)
@pytest.mark.parametrize(
    "words",
    [
        *(f"llama plain {each}" for each in ("torch 0 dp", "torch 3 dp", "megatron 1 dp", "deepspeed 2 dp")),
        *(f"llama plain {each}" for each in ("deepspeed 3 dp", "torch 2 tp", "torch 3 tp", "torch 3 offload")),
        *(f"llama plain {each}" for each in ("torch 3 cp", "deepspeed 2 tp", "deepspeed 3 cp", "deepspeed 2 cp")),
        *(f"llama listed {each}" for each in ("torch 3 dp", "deepspeed 2 dp", "megatron 1 dp")),
        *(f"llama dora {each}" for each in ("torch 0 dp", "torch 3 dp", "deepspeed 2 dp", "deepspeed 1 dp")),
        *(f"gpt2 even-dora {each}" for each in ("torch 3 dp", "deepspeed 2 dp")),
        *(f"llama patterns {each}" for each in ("torch 3 dp", "deepspeed 3 dp", "deepspeed 1 tp")),
        *(f"qwen2 attention {each}" for each in ("deepspeed 2 tp", "torch 3 tp")),
        *(f"gpt2 rs-attention {each}" for each in ("torch 2 dp", "deepspeed 3 dp")),
    ],
)  # fmt: skip
def test_every_layout_trains_what_peft_trains(tmp_path, words):
    """Its checkpoint goes on there, and in another engine, and becomes peft's adapters."""
    family, adapters, layout = words.split(maxsplit=2)
    lora, spec = ADAPTERS[adapters], tiny.model(family)
    hf = cases.saved(tmp_path, tiny.plan(spec))
    losses, gradients = reference(hf, family, lora)
    rundir = directory(tmp_path / "run", hf, layout, spec, lora=lora)
    engine = rundir.plan.layout.engine
    found, other = pool(engine, 2).run(cases.train, rundir, *ROWS)
    assert [loss for loss, _ in found["first"][:2]] == pytest.approx(losses, rel=1e-6)
    assert cases.worst(found["gradients"], gradients) < 1e-5
    assert (found["first"], found["after"]) == (other["first"], other["after"])
    assert cases.numbers(found["again"]) == pytest.approx(cases.numbers(found["after"]), rel=1e-6)
    states = parts_of(rundir.plan.workload, 0).states
    if "offload" in layout:
        assert states.weights == states.gradients == states.optimizer == 0
    else:
        assert found["held"]["optimizer"] == pytest.approx(states.optimizer, rel=0.001)
    assert {
        name
        for path in (tmp_path / "run" / "step").rglob("*.safetensors")
        for name in safe_open(path, "pt").keys()  # noqa: SIM118
        if "lora_" not in name
    } == set(), "with the frozen model"
    assert not list((tmp_path / "run" / "step").rglob("config.json")), "as if it were a whole model"
    elsewhere = directory(
        tmp_path / "other", hf, "deepspeed 2 dp" if engine == "torch" else "torch 3 dp", spec, lora=lora
    )
    again = pool(elsewhere.plan.layout.engine, 2).run(cases.resume, elsewhere, tmp_path / "run" / "step")[0]
    assert cases.numbers(again["after"]) == pytest.approx(cases.numbers(found["after"]), rel=1e-5)
    check_exports(tmp_path / "run" / "step", Path(hf), tmp_path)


def check_exports(step: Path, hf: Path, tmp_path: Path) -> None:
    """peft loads the adapters; merged by peft and by kit, the model says the same, and not what it said before."""
    from peft import PeftModel

    opened_to_hf(open_step(step), tmp_path / "peft", dtype="float32")
    opened_to_hf(open_step(step), tmp_path / "merged", dtype="float32", merge_into=hf)
    # peft corrects it with a warning where it loads the adapters; others take it as it is.
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert written["fan_in_fan_out"] is Checkpoint(step).manifest.model.traits.conv1d
    tokens = torch.arange(20).reshape(2, 10)
    base = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    before = base(tokens).logits.detach()
    adapted = PeftModel.from_pretrained(base, tmp_path / "peft")
    logits = adapted(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits - before).abs().max() > 1e-3
    torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapted.merge_and_unload()(tokens).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.everyday("four_bit torch 3 dp", "eight_bit torch 0 dp")
@pytest.mark.parametrize(
    "words",
    [
        *(f"four_bit {each}" for each in ("torch 0 dp", "torch 3 dp", "deepspeed 2 dp", "deepspeed 3 dp")),
        *(f"eight_bit {each}" for each in ("torch 0 dp", "deepspeed 1 dp", "deepspeed 2 dp")),
    ],
)
def test_quantised_weights_agree_on_every_layout(tmp_path, words):
    """Every gradient is that of a model whose weights were rounded before; here with biases, which stay as they are."""
    bits, layout = words.split(maxsplit=1)
    if layout == "torch 3 dp" and torch.__version__ < "2.13":
        pytest.skip("QLoRA under FSDP2 needs torch 2.13 or newer")
    lora, spec = dataclasses.replace(PLAIN, **{bits: True}), tiny.model("qwen2")
    hf = cases.saved(tmp_path, tiny.plan(spec))
    whole = tiny.plan(spec, job={**JOB, "lora": PLAIN}, gradient_accumulation_steps=4)
    expected = cases.alone(tmp_path / "one", whole, *ROWS, model_path=rounded(hf, tmp_path / "rounded", lora))
    exact = cases.alone(tmp_path / "whole", whole, *ROWS, model_path=hf)
    assert expected["first"][0][0] != pytest.approx(exact["first"][0][0], rel=1e-6), "codes are not fp32"
    rundir = directory(tmp_path / "run", hf, layout, spec, lora=lora)
    found = pool(rundir.plan.layout.engine, 2).run(cases.train, rundir, *ROWS)[0]
    cases.near(found, expected)
    states = parts_of(rundir.plan.workload, 0).states
    assert found["held"]["optimizer"] == pytest.approx(states.optimizer, rel=0.001)
    if layout != "deepspeed 3 dp":  # which never partitions tensors as small as these
        assert found["held"]["weights"] == pytest.approx(states.weights, rel=0.02)


def rounded(hf: str, to: Path, lora: LoraSpec) -> str:
    """A copy of the model, written by transformers, whose linear layers have been in nf4 or int8, or its experts."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model = AutoModelForCausalLM.from_pretrained(hf, local_files_only=True, dtype=torch.float32)
    linear = [each.weight for each in model.model.modules() if isinstance(each, torch.nn.Linear)]
    experts = [each for name, each in model.named_parameters() if ".experts." in name and each.ndim == 3]
    chosen = experts if lora.quantize_moe_experts else linear
    for parameter in chosen:
        if lora.four_bit:
            parameter.data = dequantize_4bit(*quantize_4bit(parameter.data, quant_type="nf4", compress_statistics=True))
        else:
            largest = parameter.data.half().float().abs().amax(1, keepdim=True)
            parameter.data = (parameter.data.half().float() * (127 / largest)).round() * largest / 127
    assert len(chosen) == (2 if lora.quantize_moe_experts else 7) * len(model.model.layers)
    model.save_pretrained(to)
    return str(to)


@pytest.mark.everyday("qwen3_moe 2")
@pytest.mark.parametrize("words", ["qwen3_moe 1", "qwen3_moe 2", "qwen2_moe 1", "mixtral 1", "gpt_oss 1", "glm4_moe 1"])
def test_experts_in_four_bits(tmp_path, words):
    """Every gradient is that of a model whose experts were rounded before; the plan knows what a rank holds."""
    family, processes = words.split()
    needed = {"glm4_moe": {"num_shared_experts": 1}, "gpt_oss": {"sliding_window": 16, "full_attention_every": 2}}
    lora, spec = dataclasses.replace(PLAIN, four_bit=True), tiny.model(family, **needed.get(family, {}))
    hf = cases.saved(tmp_path, tiny.plan(spec))
    with_experts = dataclasses.replace(lora, quantize_moe_experts=True)
    one, without = (tiny.plan(spec, job={**JOB, "lora": lora}, gradient_accumulation_steps=4) for _ in range(2))
    expected = cases.alone(tmp_path / "one", one, *ROWS, model_path=rounded(hf, tmp_path / "rounded", with_experts))
    whole = cases.alone(tmp_path / "whole", without, *ROWS, model_path=hf)
    job = {**JOB, "lora": with_experts}
    split = {"dp": int(processes), "gradient_accumulation_steps": 4 // int(processes), "recompute": "full"}
    rundir = tiny.run_directory(tmp_path / "run", tiny.plan(spec, job=job, **split), model_path=hf)
    found = pool("torch", int(processes)).run(cases.train, rundir, *ROWS)[0]
    cases.near(found, expected)
    assert found["first"][0][0] != pytest.approx(whole["first"][0][0], rel=1e-6), "nf4 is not fp32"
    held = parts_of(rundir.plan.workload, 0).states.weights
    assert found["held"]["weights"] == pytest.approx(held, rel=0.02)
    assert held < 0.8 * parts_of(one.workload, 0).states.weights


def load_and_weigh(rundir: tiny.TinyRunDirectory) -> tuple[int, dict[str, int]]:
    """What building the engine grew by at most, and what it says it holds."""
    return_freed_memory()
    cases.build(rundir).close()  # what is imported and cached the first time is not the model's
    with Peak() as peak:
        engine = cases.build(rundir)
    held = engine.memory_bytes()
    states = [each.quant_state for each in engine.modules().values() if hasattr(each, "quant_state")]
    assert {(each.quant_type, each.nested, each.blocksize) for each in states} == {("nf4", True, 64)}, "of QLoRA"
    engine.close()
    return peak.grown, held


@pytest.mark.everyday("2")
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.nightly
def test_a_model_in_four_bits_is_never_whole(tmp_path, processes):
    """Weights are read and quantised one by one: beside what stays, a few copies of one. FSDP2 shards each layer before
    it reads the next. The plan knows what stays."""
    size = {"hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8}
    spec = tiny.model(num_layers=8, head_dim=64, **size)
    hf, largest = cases.saved(tmp_path, tiny.plan(spec), torch.bfloat16), 512 * 1536
    job = {**JOB, "lora": dataclasses.replace(PLAIN, four_bit=True), "precision": "bf16"}
    plan = tiny.plan(spec, job=job, **({"zero_stage": 3, "dp": 2} if processes == 2 else {}))
    rundir = tiny.run_directory(tmp_path / "run", plan, model_path=hf)
    grown, held = pool("torch", processes).run(load_and_weigh, rundir)[0]
    assert grown < sum(held.values()) + 4 * 4 * largest
    assert grown < (8 * 4 * (512 * 512 + 3 * largest // 4) + 2 * 128 * 512), "half of the model in 16 bits"
    assert held["weights"] == pytest.approx(parts_of(plan.workload, 0).states.weights, rel=0.01)


def between(rundir: tiny.TinyRunDirectory) -> int:
    """Bytes between forward and backward, without the weights."""
    engine = cases.build(rundir)
    weights = [
        *engine._model.parameters(),
        *(each.state.SCB for each in engine.modules().values() if "state" in vars(each)),
    ]
    with LiveBytes() as live:
        live.leave_out(weights)
        loss = engine._loss(cases.batches(engine, rundir, 0)[0])
        assert loss.requires_grad, "and its graph is there"
        return live.now


@pytest.mark.everyday("fp32 full")
@pytest.mark.parametrize("words", ["fp32 none", "fp32 full", "bf16 full"])
def test_eight_bit_layers_keep_their_inputs(tmp_path, words):
    """Beside what 4-bit layers save, and recompute does not free them. The plan knows."""
    precision, recompute = words.split()
    hf, found, planned = cases.saved(tmp_path, tiny.plan()), [], []
    for bits in ("four_bit", "eight_bit"):
        job = {**JOB, "lora": dataclasses.replace(PLAIN, **{bits: True}), "precision": precision}
        rundir = tiny.run_directory(tmp_path / bits, tiny.plan(job=job, recompute=recompute), model_path=hf)
        found += pool("torch", 1).run(between, rundir)
        planned.append(parts_of(rundir.plan.workload, 0).saved_activations)
    assert found[1] - found[0] == planned[1] - planned[0]
    assert (found[1] > found[0]) == (recompute == "full"), "adapters save the same tensors"


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"target_modules": ("q_proj", "w1")}, "has w1, which LlamaForCausalLM has not"),
        ({"targets": "attention"}, "finds no linear layer in LlamaForCausalLM"),
    ],
)
def test_layers_that_are_not_there_are_named(monkeypatch, lora, says):
    """Rules know the layers of families; here of a model whose attention has another name."""
    monkeypatch.setattr("kit.engines.huggingface.adapters._ATTENTION", ("mixer",))
    assert re.search(says, refusal(EngineError, lambda: target_modules(build_skeleton(tiny.model()), LoraSpec(**lora))))


@pytest.mark.parametrize(
    ("version", "zero_stage", "says"),
    [
        ("2.12.1", 0, "job.lora without run.model_path"),
        ("2.12.1", 3, "needs torch 2.13 or newer"),
        ("2.13.0", 3, "job.lora without run.model_path"),
    ],
)
def test_weights_are_required(one_process, tmp_path, monkeypatch, version, zero_stage, says):
    """And for FSDP2 in four bits a torch that shards whole numbers."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    plan = tiny.plan(job={**JOB, "lora": dataclasses.replace(PLAIN, four_bit=True)}, zero_stage=zero_stage)
    assert says in refusal(EngineError, cases.build, tiny.run_directory(tmp_path, plan))
