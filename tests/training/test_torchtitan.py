"""torchtitan's names and order of rows become Hugging Face's. torchtitan itself is not installed here: these files are
torch's, under the names and with the order of rows that torchtitan 0.3.0's own Trainer wrote."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from kit.addons.importers.inspected import inspected
from kit.engines.huggingface.models import hf_config, random_model
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.manifest import Checkpoint
from tests.support import tiny
from tests.support.checkpoints import InMemory, same_tensors
from tests.support.refusals import refusal

INNER = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "lm_head"}
SIZE = 8
"""Of a head."""


def neighbours(rows):
    """Row 2j of a head is row j of Hugging Face's, row 2j + 1 is row j + 4."""
    order = [SIZE * (row // SIZE) + (row % 2) * SIZE // 2 + (row % SIZE) // 2 for row in range(len(rows))]
    return rows[order].contiguous()


def titan(tensors, prefix="attention.qkv_linear.", fused=False, output="lm_head"):
    """Tensors of two layers with 4 heads and 2 key/value heads, under torchtitan's names."""
    found = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in OUTER:
            found[f"{OUTER[stem] if stem != 'lm_head' else output}.weight"] = tensor
            continue
        _, _, layer, inner = stem.split(".", 3)
        if inner in INNER:
            found[f"layers.{layer}.{INNER[inner]}.weight"] = tensor
        else:
            part = inner.removeprefix("self_attn.")[0]
            found[f"layers.{layer}.{prefix}w{part}.weight"] = tensor if part == "v" else neighbours(tensor)
    for layer in range(2) if fused else ():
        q, k, v = (found.pop(f"layers.{layer}.{prefix}w{part}.weight") for part in "qkv")
        groups = [torch.cat([q[16 * g : 16 * (g + 1)], k[8 * g : 8 * (g + 1)], v[8 * g : 8 * (g + 1)]]) for g in (0, 1)]
        found[f"layers.{layer}.{prefix}wqkv.weight"] = torch.cat(groups)
    return found


@pytest.fixture
def tensors():
    return {name: tensor.detach() for name, tensor in random_model(tiny.model(), seed=1).state_dict().items()}


@pytest.fixture
def model(tmp_path):
    hf_config(tiny.model()).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def written(state, path):
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def same(step, kind, tensors):
    return same_tensors(Checkpoint(step).source(kind), InMemory(tensors))


def test_weights_and_adams_state_are_those_of_hugging_face(tensors, model, tmp_path):
    moments = {
        kind: {name: torch.rand_like(tensor) for name, tensor in tensors.items()}
        for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
    }
    state = titan(tensors) | {"train_state.step": 3, "lr_scheduler.last_epoch": 3}
    for kind, of_kind in moments.items():
        for name, tensor in titan(of_kind, fused=True).items():
            state[f"optimizer.state.{name}.{kind.value}"] = tensor
            state[f"optimizer.state.{name}.step"] = torch.tensor(3.0)
    path = written(state, tmp_path / "step-3")
    found = inspected(path)
    assert (found.program, found.step, found.adam) == ("torchtitan: torch.distributed.checkpoint", 3, True)
    assert convert(path, "step", tmp_path / "step", model=model).endswith("with Adam's state")
    assert Checkpoint(tmp_path / "step").manifest.counters.optimizer_steps == 3
    assert all(same(tmp_path / "step", kind, of) for kind, of in ((StateKind.MASTER, tensors), *moments.items()))


def test_names_of_earlier_versions_and_of_wrapped_blocks_are_read(tensors, model, tmp_path):
    state = titan(tensors, prefix="attention.", output="output")
    state = {name.replace("layers.1.", "layers.1._orig_mod."): tensor for name, tensor in state.items()}
    assert "weights only" in convert(written(state, tmp_path / "step-3"), "step", tmp_path / "step", model=model)
    assert same(tmp_path / "step", StateKind.MASTER, tensors)


@pytest.mark.parametrize(
    ("extra", "family", "words"),
    [
        (
            {"layers.0.moe.router.gate.weight": torch.ones(4, 32)},
            "llama",
            r"layers\.0\.moe\.router\.gate.* is not a te",
        ),
        ({"layers.0.attention.qkv_linear.wk.weight": torch.ones(8, 32)}, "llama", r"has shape \[8, 32\] in the check"),
        ({}, "qwen3", "torchtitan's names, of which kit reads Llama's, and .* is of family qwen3"),
    ],
)
def test_what_is_no_llama_is_refused(tensors, tmp_path, extra, family, words):
    hf_config(tiny.model(family)).save_pretrained(tmp_path / "model")
    path = written(titan(tensors) | extra, tmp_path / "step-3")
    assert re.search(
        words, refusal(CheckpointError, convert, path, "step", tmp_path / "step", model=str(tmp_path / "model"))
    )
    assert not (tmp_path / "step").exists()
