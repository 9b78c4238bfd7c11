"""Every layout trains as one process of plain transformers does: gradients by name, losses, norms, final weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.specs.job import OptimizerSpec
from tests.megatron import cases, inside, table
from tests.megatron.conftest import steps
from tests.megatron.shapes import (
    CAPPED,
    DEEPSEEK,
    GLM,
    GPT_OSS,
    GRANITE,
    LONGROPE,
    MINIMAX,
    MINISTRAL,
    NEOX,
    NO_POSITIONS,
    OLMO3,
    TWO_ROTATIONS,
    WINDOW,
)
from tests.support import tiny
from tests.support.workers import pool

LLAMA = {"num_layers": 4, "vocab_size": 127}  # 127: the vocabulary is padded under TP2
TWO_LAYERS = LLAMA | {"num_layers": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,  # megatron-core's own would be 4
    "original_max_position_embeddings": 16,
}

CASES = {
    "tp2": ("llama", LLAMA, {"tp": 2}),
    "tp2-sp": ("llama", LLAMA, {"tp": 2, "sp": True}),
    "tp2-one-kv-head": ("llama", LLAMA | {"num_key_value_heads": 1}, {"tp": 2}),
    "tp2-sp-tied-qwen2": ("qwen2", LLAMA | {"tied_embeddings": True}, {"tp": 2, "sp": True}),
    "tp2-qwen3": ("qwen3", LLAMA, {"tp": 2}),
    "tp2-sp-recompute-qwen3": ("qwen3", LLAMA, {"tp": 2, "sp": True, "recompute": "full"}),
    "pp2-tied-llama3-rope": ("llama", LLAMA | {"tied_embeddings": True, "rope_scaling": LLAMA3_ROPE}, {"pp": 2}),
    "pp2-vp2-recompute": ("llama", LLAMA, {"pp": 2, "vp": 2, "recompute": "full"}),
    "pp2-uneven": ("llama", LLAMA | {"num_layers": 3}, {"pp": 2, "first_stage_layers": 1}),
    "pp2-vp2-uneven": (
        "llama",
        LLAMA | {"num_layers": 6},
        {"pp": 2, "vp": 2, "first_stage_layers": 3, "last_stage_layers": 3},
    ),
    "tp2-sp-mlp": ("llama", TWO_LAYERS, {"tp": 2, "sp": True, "recompute": "selective", "recompute_modules": ("mlp",)}),
    "cp2-selective": ("llama", TWO_LAYERS, {"cp": 2, "recompute": "selective"}),
    "dp2-distributed-optimizer": ("llama", LLAMA, {"dp": 2, "zero_stage": 1}),
    "dp2-ranges-that-cut-rows": (  # the boundary of two ranks is inside a row of a matrix
        "llama",
        LLAMA | {"num_layers": 3, "hidden_size": 24, "ffn_hidden_size": 36, "head_dim": 6},
        {"dp": 2, "zero_stage": 1},
    ),
    "dp2-plain-optimizer": ("llama", LLAMA, {"dp": 2}),
    "cp2": ("llama", LLAMA, {"cp": 2}),
    "cp2-ring": ("llama", TWO_LAYERS, {"cp": 2, "cp_comm_type": "p2p"}),
    "cp2-tp2-distributed-optimizer-qwen3": ("qwen3", LLAMA, {"cp": 2, "tp": 2, "sp": True, "zero_stage": 1}),
    "tp2-sp-mistral": ("mistral", TWO_LAYERS | WINDOW, {"tp": 2, "sp": True}),
    "cp2-mistral": ("mistral", TWO_LAYERS | WINDOW, {"cp": 2}),
    "tp2-phi3": ("phi3", TWO_LAYERS, {"tp": 2}),
    "pp2-longrope-phi3": ("phi3", TWO_LAYERS | WINDOW | {"rope_scaling": LONGROPE}, {"pp": 2}),
    "tp2-sp-gpt2": ("gpt2", TWO_LAYERS, {"tp": 2, "sp": True}),
    "pp2-tied-gpt2": ("gpt2", TWO_LAYERS, {"pp": 2}),
    "dp2-pp2-ep2-mixtral": ("mixtral", TWO_LAYERS, {"dp": 2, "pp": 2, "ep": 2}),
    "ep2-mixtral": ("mixtral", TWO_LAYERS, {"dp": 2, "ep": 2, "zero_stage": 1}),
    "tp2-sp-qwen3-moe": ("qwen3_moe", TWO_LAYERS, {"tp": 2, "sp": True, "etp": 2}),
    "ep2-tp2-sp-qwen3-moe": ("qwen3_moe", TWO_LAYERS | {"norm_topk_prob": False}, {"tp": 2, "sp": True, "ep": 2}),
    "ep2-etp2-mixtral": ("mixtral", TWO_LAYERS, {"dp": 2, "tp": 2, "sp": True, "ep": 2, "etp": 2, "zero_stage": 1}),
    "tp2-sp-gemma2": ("gemma2", TWO_LAYERS | CAPPED, {"tp": 2, "sp": True}),
    "cp2-gemma3": ("gemma3_text", TWO_LAYERS | TWO_ROTATIONS, {"cp": 2}),
    "pp2-neox": ("gpt_neox", TWO_LAYERS | NEOX, {"pp": 2}),
    "tp2-sp-ep2-deepseek": ("deepseek_v3", TWO_LAYERS | DEEPSEEK, {"tp": 2, "sp": True, "ep": 2}),
    "tp2-dense-deepseek": (
        "deepseek_v3",
        TWO_LAYERS | DEEPSEEK | {"first_dense_layers": 2},
        {"tp": 2, "etp": 2, "sp": True},
    ),
    "tp2-sp-ep2-gpt-oss": ("gpt_oss", TWO_LAYERS | GPT_OSS, {"tp": 2, "sp": True, "ep": 2}),
    "tp2-seed-oss": ("seed_oss", TWO_LAYERS, {"tp": 2}),
    "pp2-smollm3": ("smollm3", TWO_LAYERS | NO_POSITIONS, {"pp": 2}),
    "tp2-sp-tied-granite": ("granite", TWO_LAYERS | GRANITE | {"tied_embeddings": True}, {"tp": 2, "sp": True}),
    "pp2-granite": ("granite", TWO_LAYERS | GRANITE, {"pp": 2}),
    "cp2-ministral3": ("ministral3", TWO_LAYERS | MINISTRAL, {"cp": 2}),
    "tp2-olmo2": ("olmo2", TWO_LAYERS, {"tp": 2}),
    "tp2-sp-dp2-olmo2": ("olmo2", TWO_LAYERS, {"tp": 2, "sp": True, "dp": 2, "zero_stage": 1}),
    "tp2-sp-olmo3": ("olmo3", TWO_LAYERS | OLMO3, {"tp": 2, "sp": True}),
    "cp2-short-olmo3": ("olmo3", TWO_LAYERS | OLMO3 | {"sliding_window": 64}, {"cp": 2}),
    "tp2-short-gemma3": ("gemma3_text", TWO_LAYERS | TWO_ROTATIONS | {"sliding_window": 64}, {"tp": 2}),
    "tp2-sp-ep2-qwen2-moe": (
        "qwen2_moe",
        TWO_LAYERS | {"norm_topk_prob": False},
        {"tp": 2, "sp": True, "ep": 2},
    ),
    "tp2-sp-ep2-glm4-moe": ("glm4_moe", TWO_LAYERS | GLM, {"tp": 2, "sp": True, "ep": 2}),
    "tp2-sp-ep2-shared-overlap-glm4-moe": (
        "glm4_moe",
        TWO_LAYERS | GLM,
        {"tp": 2, "sp": True, "ep": 2, "extra": {"moe_shared_expert_overlap": True}},
    ),
    "pp2-glm4-moe-air": ("glm4_moe", TWO_LAYERS | GLM | {"biases": None, "qk_norm": None}, {"pp": 2}),
    "tp2-sp-minimax-m2": ("minimax_m2", TWO_LAYERS | MINIMAX, {"tp": 2, "sp": True, "etp": 2}),
    "dp2-ep2-minimax-m2": ("minimax_m2", TWO_LAYERS | MINIMAX, {"dp": 2, "ep": 2, "zero_stage": 1}),
    "tp4-five-tokens": ("llama", TWO_LAYERS | {"vocab_size": 5}, {"tp": 4}),  # the last rank has padding alone
    "tp2-pp2-sp": ("llama", LLAMA, {"tp": 2, "pp": 2, "sp": True}),
    "dp2-pp2-vp2-distributed-optimizer-tied-qwen3": (
        "qwen3",
        LLAMA | {"tied_embeddings": True},
        {"dp": 2, "pp": 2, "vp": 2, "zero_stage": 1},
    ),
}


def compare(references, case, fault=None, packed=False, eps=cases.EPS):
    family, shape, layout = case
    spec = tiny.model(family, **shape)
    directory, expected = references(spec, packed, eps=eps)
    job = {"optimizer": OptimizerSpec(eps=eps, weight_decay=0.1)}
    rundir = cases.run_directory(directory / "run", spec, job=job, **layout)
    found = pool("megatron", rundir.plan.layout.world_size).run(cases.train, rundir, steps(spec), packed, fault)
    for rank in found[1:]:
        assert (rank.losses, rank.norms, rank.tokens) == (found[0].losses, found[0].norms, found[0].tokens)
        assert (rank.initial, rank.gradients, rank.masters) == ({}, {}, {})
    return cases.differences(found[0], expected)


@pytest.mark.everyday(
    "tp2-one-kv-head",
    "tp2-sp-mlp",
    "cp2-selective",
    "cp2-ring",
    "dp2-ranges-that-cut-rows",
    "dp2-plain-optimizer",
    "pp2-longrope-phi3",
    "ep2-etp2-mixtral",
    "tp2-sp-gemma2",
    "cp2-gemma3",
    "pp2-neox",
    "tp2-sp-ep2-deepseek",
    "tp2-sp-ep2-gpt-oss",
    "tp2-sp-tied-granite",
    "dp2-pp2-vp2-distributed-optimizer-tied-qwen3",
)
@pytest.mark.parametrize("name", CASES)
def test_same_as_transformers(references, name):
    assert compare(references, CASES[name]) == []


OF_CELLS = {
    "megatron-ring-forgets-a-part": ("cp4-ring-selective llama", "norms[0]"),
    "megatron-summed-expert-biases": ("ep2-tp2-sp gpt_oss", "gradients["),
    "megatron-joined-documents": ("cp2-packed llama", "losses[0]"),
    "megatron-running-positions": ("pp2-vp2-packed gpt2", "losses[0]"),
}


def compare_cell(references, name, fault=None):
    layout, family = name.split()
    (sizes, changes), (kind, shape) = table.LAYOUTS[layout], table.FAMILIES[family]
    return compare(references, (kind, shape | changes, sizes), fault, packed=layout in table.PACKED, eps=table.EPS)


@pytest.mark.everyday("cp2-packed llama")
@pytest.mark.parametrize("name", table.CELLS)
def test_every_family_on_its_layouts(references, name):
    """Packed: three documents in each row, each of which transformers computes alone."""
    assert compare_cell(references, name) == []


@pytest.mark.everyday("False")
@pytest.mark.parametrize("sp", [False, True])
def test_dropout_is_drawn_again_alike(references, sp):
    """No layout has it by itself; who edits megatron.yaml gets it, and recompute finds the same masks again."""
    spec = tiny.model("llama", **TWO_LAYERS)
    directory, expected = references(spec)
    runs = []
    for recompute in ("none", "full", "selective"):
        rundir = cases.run_directory(directory / "run", spec, tp=2, sp=sp, recompute=recompute)
        rundir.settings["transformer_config"] |= {"attention_dropout": 0.2, "hidden_dropout": 0.1}
        runs.append(pool("megatron", 2).run(cases.train, rundir, 2)[0])
    assert [(run.losses, run.norms) for run in runs[1:]] == [(runs[0].losses, runs[0].norms)] * (len(runs) - 1)
    assert abs(runs[0].losses[0] - expected.losses[0]) > 1e-3


def test_each_rank_drops_places_of_its_own():
    """Ranks of a tensor-parallel group have different heads: the same mask for all would be half of the masks."""
    with tempfile.TemporaryDirectory() as directory:
        rundir = cases.run_directory(Path(directory) / "run", tiny.model(), model_path=None, tp=2)
        rundir.settings["transformer_config"] |= {"attention_dropout": 0.5}
        one, other = pool("megatron", 2).run(cases.inside, rundir, inside.dropped_places)
    assert not torch.equal(one, other)


def test_longropes_factors_follow_the_whole_document_on_every_rank():
    """Long ones beyond the original length and not at it, also where a rank has the beginning of a document alone."""
    spec = tiny.model("phi3", **TWO_LAYERS | {"rope_scaling": LONGROPE})
    assert [pool("megatron", 2).run(inside.longrope, spec, length) for length in (16, 18)] == [[False] * 2, [True] * 2]


def test_embeddings_of_gemma_are_scaled_in_their_own_dtype(references):
    """By √32 rounded to bf16, as transformers does it."""
    spec = tiny.model("gemma2", **TWO_LAYERS | CAPPED)
    directory, _ = references(spec)
    rundir = cases.run_directory(directory / "run", spec, job={"precision": "bf16"}, tp=2)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.bfloat16)
    inputs, _ = cases.step_batch(spec.vocab_size, 0)
    with torch.no_grad():
        expected = model.get_input_embeddings()(inputs)
    assert torch.equal(pool("megatron", 2).run(cases.inside, rundir, inside.embedded)[0].transpose(0, 1), expected)


def test_rotary_positions_are_those_that_are_given():
    positions = torch.tensor([[0, 1, 2, 0, 1, 5]])
    running, angles = pool("megatron", 2).run(inside.rotations, tiny.model(head_dim=8), positions)[0]
    assert angles.shape == running.shape == (6, 1, 1, 8)
    assert torch.equal(angles, running[positions[0]])


FAULTS = {
    "megatron-swap-qk": ("tp2", "gradients[model.layers.0.self_attn.q_proj.weight]"),
    "megatron-skip-sequence-parallel-reduction": ("tp2-sp", "gradients[model.norm.weight]"),
    "megatron-double-gradients": ("dp2-distributed-optimizer", "gradients[lm_head.weight]"),
    "megatron-batched-interleaving": ("pp2-vp2-recompute", "losses[0]"),
    "megatron-shifted-stages": ("pp2-tied-llama3-rope", "gradients[model.layers.0.mlp.up_proj.weight]"),
    "megatron-unbalanced-context": ("cp2", "losses[0]"),
    "megatron-swapped-experts": ("ep2-mixtral", "losses[0]"),
    "megatron-decayed-norms": ("tp2", "masters[model.norm.weight]"),
    "megatron-shared-key-of-own-heads": (
        "tp2-sp-ep2-deepseek",
        "gradients[model.layers.0.self_attn.kv_a_proj_with_mqa.weight]",
    ),
    "megatron-norm-of-own-heads": ("tp2-olmo2", "gradients[model.layers.0.self_attn.q_norm.weight]"),
    "megatron-whole-residual": ("tp2-sp-tied-granite", "losses[0]"),
    "megatron-ungated-shared-expert": ("tp2-sp-ep2-qwen2-moe", "losses[0]"),
    "megatron-one-rotation": ("tp2-short-gemma3", "losses[0]"),
    "megatron-forgotten-correction": (
        "dp2-ep2-minimax-m2",
        "gradients[model.layers.0.block_sparse_moe.gate.weight]",
    ),
}


@pytest.mark.everyday("megatron-swap-qk", "megatron-joined-documents")
@pytest.mark.parametrize("fault", [*OF_CELLS, *FAULTS])
def test_planted_faults_show(references, fault):
    name, shows_in = (OF_CELLS | FAULTS)[fault]
    compared, case = (compare_cell, name) if fault in OF_CELLS else (compare, CASES[name])
    problems = compared(references, case, fault)
    assert any(problem.startswith(shows_in) for problem in problems), problems


if __name__ == "__main__":
    raise SystemExit(pytest.main(["-q", __file__, "-k", "same_as_transformers or its_layouts or faults"]))
