"""Types that no family describes: gradients under FSDP2 and ZeRO-3 on two processes beside plain transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.buffers import is_buffer
from kit.engines.huggingface.count_parameters import described
from kit.engines.huggingface.loaded import hf_weights
from kit.engines.huggingface.models import HfDirectory, hf_config, random_model
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError, EngineError
from kit.planner.plan import Plan
from kit.specs.approximate import approximated
from kit.specs.model import ModelSpec
from kit.training.checkpoint.formats import open_step
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.checkpoint.to_huggingface import opened_to_hf
from tests.deepspeed import cases, plain
from tests.support import tiny
from tests.support.refusals import refusal
from tests.support.workers import pool

SIZES = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
TYPES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "cwm": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "ernie4_5": {},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5},
    "granitemoe": {**EXPERTS},
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
    "minimax_m2": {**EXPERTS},
    "ministral3": {},
    "nemotron": {},
    "olmo": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "olmoe": {**EXPERTS},
    "persimmon": {},
    "phi": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "vaultgemma": {},
}
"""Model type → what its tiny model has beside the sizes. Not phimoe, whose router draws random numbers in training
(modeling_phimoe.py, sparsemixer)."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP2": {"engine": "torch", "zero_stage": 3, "dp": 2, "gradient_accumulation_steps": 2},
    "ZeRO-3": {"engine": "deepspeed", "zero_stage": 3, "dp": 2, "gradient_accumulation_steps": 2},
}
TOLERANCE = 1e-5


def spec_of(model_type: str, **own: Any) -> ModelSpec:
    config = {"model_type": model_type, **SIZES, **TYPES.get(model_type, {}), **own}
    return approximated(config, described(config), model_type, "tiny")


def first_step(chosen: Plan, directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """In a worker: the random weights that training starts from, the gradients of a step, its loss."""
    from kit.engines.torch.engine import TorchEngine

    if chosen.layout.engine == "deepspeed":
        engine: Any = cases.build(chosen, None, directory)
    else:
        engine = TorchEngine(tiny.run_directory(directory, chosen))  # type: ignore[arg-type]
    weights = {name: tensor.clone() for name, tensor in full_tensors(engine, StateKind.MASTER).items()}
    loss = engine.forward_backward(cases.micro_batches(engine, chosen, 0)).mean
    exported = full_tensors(engine, StateKind.GRADIENT)
    gradients = {name: tensor for name, tensor in exported.items() if not is_buffer(name)}
    engine.close()
    return weights, gradients, loss


@pytest.mark.everyday("llama4_text-FSDP2", "olmo3-ZeRO-3")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", TYPES)
def test_gradients_are_plain_transformers(model_type: str, layout: str, tmp_path: Path) -> None:
    spec = spec_of(model_type)
    weights, gradients, loss = pool("deepspeed", 2).run(first_step, tiny.plan(spec, **LAYOUTS[layout]), tmp_path)[0]
    model = random_model(spec, seed=0)
    model.load_state_dict({name: weights[name] for name, _ in model.named_parameters()}, strict=False)
    assert loss == pytest.approx(plain.backward(model, 0), rel=TOLERANCE)
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    norm = float(torch.stack([g.double().square().sum() for g in wanted.values()]).sum().sqrt())
    assert plain.gradient_error(*[plain.Curve([], [norm], found, {}) for found in (gradients, wanted)]) < TOLERANCE


def test_dropout_is_left_out_and_no_other_number() -> None:
    config = hf_config(spec_of("stablelm", attention_dropout=0.5, hidden_dropout=0.25, layer_norm_eps=0.125))
    assert (config.attention_dropout, config.hidden_dropout, config.layer_norm_eps) == (0.0, 0.0, 0.125)


def test_a_type_with_parameters_that_are_never_trained_is_refused() -> None:
    own = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1}
    assert re.search(
        r"ernie4_5_moe has parameters that are not trained, first .*correction_bias",
        refusal(EngineError, random_model, spec_of("ernie4_5_moe", **own), seed=0),
    )


@pytest.mark.everyday("qwen3_next")
@pytest.mark.parametrize("model_type", ["granitemoe", "llama4_text", "qwen3_next", "smollm3"])
def test_what_was_trained_is_exported_and_goes_on(model_type: str, tmp_path: Path) -> None:
    """A checkpoint of ZeRO-3, loaded bit for bit by a fresh engine, and the model that transformers loads."""
    chosen = tiny.plan(spec_of(model_type), **LAYOUTS["ZeRO-3"])
    workers = pool("deepspeed", 2)
    workers.run(cases.leave, chosen, None, tmp_path, 1)
    _, different = workers.run(cases.go_on, chosen, tmp_path / "step", tmp_path / "again", 1)[0]
    assert not different
    opened_to_hf(open_step(tmp_path / "step"), tmp_path / "hf", dtype="float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    source = Checkpoint(tmp_path / "step").source(StateKind.MASTER)
    assert [
        name for name, parameter in loaded.named_parameters() if not torch.equal(parameter, source.read(name))
    ] == []


@pytest.mark.parametrize("model_type", ["apertus", "granitemoe", "olmo3", "qwen3_next"])
def test_weights_of_a_directory_are_those_that_transformers_loads(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensor by tensor where the names are the module's; by transformers where it fuses experts or saves more."""
    spec = spec_of(model_type)
    model = random_model(spec, seed=3)
    model.save_pretrained(tmp_path)
    source = hf_weights(spec, tmp_path)
    assert all(torch.equal(source.read(name), parameter) for name, parameter in model.named_parameters())
    assert ("loaded whole by every process" in capsys.readouterr().out) is (model_type != "olmo3")
    if model_type == "granitemoe":
        weights = load_file(tmp_path / "model.safetensors")
        del weights["model.layers.0.input_layernorm.weight"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert "lacks 1 tensors of granitemoe, first model.layers.0." in refusal(
            CheckpointError, hf_weights, spec, tmp_path
        )


@pytest.mark.parametrize(
    ("method", "said"), [("fp8", "dequantize=True"), ("awq", "made from; QLoRA"), ("gptq", "QLoRA"), ([1], "QLoRA")]
)
def test_quantised_weights_are_refused_with_what_can_be_trained(method: Any, said: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert re.search(f"are quantised .*{said}", refusal(CheckpointError, HfDirectory, tmp_path))
