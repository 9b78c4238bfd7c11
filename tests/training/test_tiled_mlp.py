"""Tiled MLPs against whole ones: every gradient, with every engine's hooks around them, and what they save."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from kit.cost.memory.activations_huggingface import layer_bytes
from kit.cost.workload import Workload
from kit.engines.base import StateKind
from kit.engines.huggingface.models import build_model
from kit.engines.kernels import tiled_mlp
from kit.engines.torch.engine import TorchEngine
from kit.specs.layout import mlp_tiles
from kit.specs.model import FAMILIES
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.test_torch_engine import relative_error

LONG = {"recompute": "full", "chunked_loss": True, "activation_offloading": True}
RING, ULYSSES = {"cp_comm_type": "p2p"}, {"cp_comm_type": "a2a"}
CASES = {
    "one process": (1, "llama", {}),
    "one process, recompute": (1, "gpt2", {"recompute": "full"}),
    "DDP": (2, "phi3", {"dp": 2}),
    "DDP, recompute": (2, "gemma2", {"dp": 2, "recompute": "full"}),
    "FSDP2, stage 2": (2, "qwen3", {"dp": 2, "zero_stage": 2}),
    "FSDP2, stage 3": (2, "starcoder2", {"dp": 2, "zero_stage": 3, **LONG}),
    "ring": (2, "llama", {"cp": 2, "zero_stage": 3, **RING, **LONG}),
    "ring, four": (4, "qwen3", {"cp": 4, "zero_stage": 3, **RING, **LONG}),
    "Ulysses": (2, "olmo2", {"cp": 2, "zero_stage": 2, **ULYSSES}),
    "Ulysses, two of four": (4, "llama", {"cp": 2, "dp": 2, "zero_stage": 3, **ULYSSES, **LONG}),
}


def model(family):
    """Hidden 6: six tiles of 32 tokens, the last of two; three and two of a part of two and four ranks. Hidden 8 where
    heads share it evenly: four tiles."""
    traits = FAMILIES[family]
    own = {"sliding_window": 16, "query_pre_attn_scalar": 8} if family == "gemma2" else {}
    own |= {"hidden_size": 8, "head_dim": 4} if traits.even_heads else {"hidden_size": 6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1 if traits.grouped_queries else 2}
    return tiny.model(family, ffn_hidden_size=20, **heads, **own)


def trained(rundir: tiny.TinyRunDirectory, fault: str | None = None):
    """Gradients and loss of a step, and of an evaluation."""
    right = tiled_mlp.checkpoint, torch.cat
    if fault == "a tile's weights have no gradient":
        tiled_mlp.checkpoint = without_weights_of_the_first(right[0])
    if fault == "tiles in another order":
        torch.cat = lambda parts, dim=0: right[1](parts[::-1] if dim == -2 else parts, dim=dim)
    try:
        engine = TorchEngine(rundir)
        batches = cases.batches(engine, rundir, 0)
        loss = engine.forward_backward(batches)
        gradients = cases.state(engine, StateKind.GRADIENT)
        engine.discard()
        return loss.mean, gradients, engine.evaluate(batches).mean
    finally:
        tiled_mlp.checkpoint, torch.cat = right


def without_weights_of_the_first(checkpoint):
    def run(function, tile, **how):
        def frozen(tokens):
            weights = list(inspect.getclosurevars(function).nonlocals["whole"].__self__.parameters())
            for weight in weights:
                weight.requires_grad_(tile.storage_offset() > 0)
            try:
                return function(tokens)
            finally:
                for weight in weights:
                    weight.requires_grad_(True)

        return checkpoint(frozen, tile, **how)

    return run


def both(tmp_path, ranks, family, layout, fault=None):
    """(loss, gradients, evaluation) of whole MLPs on one process, and of tiled ones on ``ranks``."""
    samples = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    alone = tiny.plan(model(family), **samples | {"gradient_accumulation_steps": 2 * layout.get("dp", 1)})
    split = tiny.plan(model(family), tiled_mlp=True, **samples, **layout)
    (one,) = pool("torch", 1).run(trained, tiny.run_directory(tmp_path / "one", alone))
    return one, pool("torch", ranks).run(trained, tiny.run_directory(tmp_path / "tiled", split), fault)[0]


@pytest.mark.everyday("one process")
@pytest.mark.parametrize(("ranks", "family", "layout"), CASES.values(), ids=CASES.keys())
def test_every_gradient_is_that_of_whole_mlps(tmp_path, ranks, family, layout):
    (loss, gradients, evaluated), found = both(tmp_path, ranks, family, layout)
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert found[2] == pytest.approx(evaluated, rel=1e-6)
    for name, gradient in gradients.items():
        assert relative_error(found[1][name], gradient) < 1e-5, name


@pytest.mark.parametrize("fault", ["a tile's weights have no gradient", "tiles in another order"])
def test_a_planted_fault_turns_the_comparison_red(tmp_path, fault):
    (_, gradients, _), found = both(tmp_path, *CASES["one process"], fault)
    worst = max(relative_error(found[1][name], gradient) for name, gradient in gradients.items())
    assert worst > 1e-2


def test_in_16_bits_sums_of_tiles_are_rounded_a_little_more(tmp_path):
    """Autograd adds the tiles' gradients of a weight in 16 bits, as DeepSpeed's TiledMLP does."""
    found = {}
    for name, precision, tiled in (("fp32", "fp32", False), ("whole", "bf16", False), ("tiled", "bf16", True)):
        plan = tiny.plan(model("llama"), dp=2, zero_stage=3, tiled_mlp=tiled, job={"precision": precision})
        found[name] = pool("torch", 2).run(trained, tiny.run_directory(tmp_path / name, plan))[0][1]
    name = "model.layers.0.mlp.down_proj.weight"
    whole, tiled = (relative_error(found[each][name], found["fp32"][name]) for each in ("whole", "tiled"))
    assert 1e-4 < whole < 2e-2
    assert tiled < 2 * whole


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_saves_what_the_plan_counts(tmp_path, precision):
    """Bytes of distinct storages of three layers less those of two; bf16 under autocast."""
    sizes = []
    for layers in (2, 3):
        spec = dataclasses.replace(model("llama"), num_layers=layers)
        plan = tiny.plan(spec, tiled_mlp=True, job={"precision": precision})
        sizes.append(saved_bytes(build_model(tiny.run_directory(tmp_path, plan), torch.float32, "cpu"), precision))
    expected = layer_bytes(Workload(plan.model, plan.cluster, plan.job, plan.layout), False)
    assert sizes[1] - sizes[0] == expected


def saved_bytes(whole, precision):
    tiled_mlp.tile_mlps(whole)
    weights = {tuple(sorted(parameter.shape)) for parameter in whole.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        of_weight = tuple(sorted(tensor.shape)) in weights
        if tensor.ndim > 1 and not of_weight:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, whole.config.vocab_size, (2, tiny.SEQ_LENGTH))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        output = whole.base_model(input_ids=ids, use_cache=False).last_hidden_state
    assert output.grad_fn is not None
    return sum(kept.values())


def test_as_many_tiles_as_alst_makes():
    """ceil(sequence / hidden): deepspeed/runtime/sequence_parallel/ulysses_sp.py, TiledMLP's example."""
    assert [mlp_tiles(tokens, 4096) for tokens in (1, 4096, 4097, 131072)] == [1, 1, 2, 32]
