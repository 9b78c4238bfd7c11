"""Adapters on Megatron's layers: per parameter what peft computes in one process, on every layout."""

from __future__ import annotations

import dataclasses

import pytest

from kit.engines.protocol import StateKind
from kit.specs.job import LoraSpec
from kit.training.checkpoint.manifest import Checkpoint
from tests.megatron import cases
from tests.megatron.conftest import steps
from tests.megatron.shapes import BY_FAMILY
from tests.support import tiny
from tests.support.checkpoints import InMemory, same_tensors
from tests.support.workers import pool
from tests.training.cases import not_to_the_bit

LORA = LoraSpec(rank=3, alpha=12)
ATTENTION = LoraSpec(rank=3, alpha=12, targets="attention")
CASES = {
    "tp2-llama": ("llama", LORA, {"tp": 2}),
    "tp2-sp-llama": ("llama", LORA, {"tp": 2, "sp": True}),
    "pp2-recompute-qwen3": ("qwen3", LORA, {"pp": 2, "recompute": "full"}),
    "dp2-distributed-optimizer-gpt2": ("gpt2", LORA, {"dp": 2, "zero_stage": 1}),
    "cp2-phi3": ("phi3", LORA, {"cp": 2}),
    "tp2-sp-ep2-qwen3-moe": ("qwen3_moe", ATTENTION, {"tp": 2, "sp": True, "ep": 2}),
    "dp2-ep2-mixtral": ("mixtral", LORA, {"dp": 2, "ep": 2, "zero_stage": 1}),
    "tp2-sp-ep2-deepseek": ("deepseek_v3", ATTENTION, {"tp": 2, "sp": True, "ep": 2}),
    "tp2-sp-gemma2": ("gemma2", LORA, {"tp": 2, "sp": True}),
    "tp2-rslora-llama": ("llama", dataclasses.replace(LORA, use_rslora=True), {"tp": 2}),
    "tp2-sp-granite": ("granite", LORA, {"tp": 2, "sp": True}),
}


def prepared(references, name):
    family, lora, layout = CASES[name]
    spec = tiny.model(family, **{"num_layers": 2, "vocab_size": 127} | BY_FAMILY.get(family, {}))
    directory, expected = references(spec, lora=lora)
    return cases.run_directory(directory / "run", spec, job={"lora": lora}, **layout), expected


def compare(references, name, fault=None):
    rundir, expected = prepared(references, name)
    found = pool("megatron", 2).run(cases.train, rundir, steps(rundir.plan.model), False, fault)
    return cases.differences(found[0], expected)


@pytest.mark.everyday("pp2-recompute-qwen3", "tp2-sp-ep2-deepseek")
@pytest.mark.parametrize("name", CASES)
def test_same_as_peft(references, name):
    assert compare(references, name) == []


@pytest.mark.everyday("megatron-adapters-without-collective-tp2-llama-losses[0]")
@pytest.mark.parametrize(
    ("fault", "name", "shows_in"),
    [
        ("megatron-adapters-without-collective", "tp2-llama", "losses[0]"),
        (
            "megatron-adapters-of-own-sequence",
            "tp2-sp-llama",
            "gradients[base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight]",
        ),
    ],
)
def test_planted_faults_show(references, fault, name, shows_in):
    problems = compare(references, name, fault)
    assert any(problem.startswith(shows_in) for problem in problems), problems


def test_adapters_resume_bit_for_bit(references, tmp_path):
    rundir, _ = prepared(references, "tp2-sp-llama")
    found = cases.resumed(rundir, tmp_path)[0]
    assert not_to_the_bit(found) == []
    assert all(".lora_" in name for name in found[StateKind.MASTER])
    written = Checkpoint(tmp_path / "step")
    assert written.manifest.lora == LORA
    assert [
        kind for kind in written.manifest.kinds if not same_tensors(written.source(kind), InMemory(found[kind]))
    ] == []
