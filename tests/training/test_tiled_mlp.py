"""Tiled MLPs against whole ones: every gradient, with every engine's hooks around them, and what they save."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kit.cost.memory.activations_huggingface import layer_bytes
from kit.engines.huggingface.models import random_model
from kit.engines.kernels import tiled_mlp
from kit.specs.families import FAMILIES
from kit.specs.job import OptimizerSpec
from kit.specs.layout import mlp_tiles
from tests.support import saved_tensors, tiny
from tests.training import cases

LONG = {"recompute": "full", "chunked_loss": True, "activation_offloading": True}
JOB = {"optimizer": OptimizerSpec(eps=1e-3)}
RING, ULYSSES = {"cp_comm_type": "p2p"}, {"cp_comm_type": "a2a"}
CASES = {
    "one process": ("llama", {}),
    "one process, recompute": ("gpt2", {"recompute": "full"}),
    "DDP": ("phi3", {"dp": 2}),
    "DDP, recompute": ("gemma2", {"dp": 2, "recompute": "full"}),
    "FSDP2, stage 2": ("qwen3", {"dp": 2, "zero_stage": 2}),
    "FSDP2, stage 3": ("starcoder2", {"dp": 2, "zero_stage": 3, **LONG}),
    "ring": ("llama", {"cp": 2, "zero_stage": 3, **RING, **LONG}),
    "ring, four": ("qwen3", {"cp": 4, "zero_stage": 3, **RING, **LONG}),
    "Ulysses": ("olmo2", {"cp": 2, "zero_stage": 2, **ULYSSES}),
    "Ulysses, two of four": ("llama", {"cp": 2, "dp": 2, "zero_stage": 3, **ULYSSES, **LONG}),
}


def model(family):
    """Hidden 6: six tiles of 32 tokens, the last of two; three and two of a part of two and four ranks. Hidden 8 where
    heads share it evenly: four tiles."""
    traits = FAMILIES[family]
    own = {
        "num_attention_heads": 2, "num_key_value_heads": 1 if traits.grouped_queries else 2,
        **({"hidden_size": 8, "head_dim": 4} if traits.even_heads else {"hidden_size": 6}),
        **({"sliding_window": 16, "query_pre_attn_scalar": 8} if family == "gemma2" else {}),
    }  # fmt: skip
    return tiny.model(family, ffn_hidden_size=20, **own)


def plans(family, layout):
    """Of whole MLPs in one process, and of tiled ones with as many samples."""
    one = tiny.plan(model(family), job=JOB, gradient_accumulation_steps=2 * layout.get("dp", 1))
    return one, tiny.plan(model(family), job=JOB, tiled_mlp=True, gradient_accumulation_steps=2, **layout)


@pytest.mark.everyday("one process", "FSDP2, stage 3")
@pytest.mark.parametrize(("family", "layout"), CASES.values(), ids=CASES)
def test_every_gradient_is_that_of_whole_mlps(tmp_path, family, layout):
    cases.agree(tmp_path, *plans(family, layout))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_saves_what_the_plan_counts(tmp_path, precision):
    """Bytes of distinct storages of three layers less those of two; bf16 under autocast."""
    specs = [dataclasses.replace(model("llama"), num_layers=layers) for layers in (2, 3)]
    plans = [tiny.plan(spec, tiled_mlp=True, job={"precision": precision}) for spec in specs]
    models = [random_model(plan.model, seed=7) for plan in plans]
    less, more = (saved_bytes(each, precision) for each in models)
    assert more - less == layer_bytes(plans[1].workload, False)


def saved_bytes(whole, precision):
    tiled_mlp.tile_mlps(whole)
    weights = {tuple(sorted(parameter.shape)) for parameter in whole.parameters()}
    ids = torch.randint(0, whole.config.vocab_size, (2, tiny.SEQ_LENGTH))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return saved_tensors.saved_bytes(
            lambda: whole.base_model(input_ids=ids, use_cache=False).last_hidden_state,
            lambda tensor: tensor.ndim > 1 and tuple(sorted(tensor.shape)) not in weights,
        )


def test_as_many_tiles_as_alst_makes():
    """ceil(sequence / hidden): deepspeed/runtime/sequence_parallel/ulysses_sp.py, TiledMLP's example."""
    assert [mlp_tiles(tokens, 4096) for tokens in (1, 4096, 4097, 131072)] == [1, 1, 2, 32]
