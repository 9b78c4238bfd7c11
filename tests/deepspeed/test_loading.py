"""Memory while DeepSpeed's engine is built: what a process really takes beside what the plan says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from kit.cost.memory.peak import parts_of
from kit.cost.workload import Workload
from kit.engines.deepspeed.whole_model import whole_model
from kit.engines.huggingface.models import random_model
from tests.deepspeed import cases
from tests.support import tiny
from tests.support.calls import before
from tests.support.peak_memory import Peak, own_bytes, return_freed_memory
from tests.support.workers import pool
from tests.training.cases import same

SIZE = {"hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8}


def spec():
    return tiny.model(num_layers=12, head_dim=64, vocab_size=2048, **SIZE)


def weigh(chosen, begun, directory):
    """Building the engine: bytes at most, and bytes when the matrices have been copied into the flat buffer."""
    flat = []
    return_freed_memory()
    cases.build(chosen, begun, directory).close()  # what is imported and cached the first time is not the model's
    with pytest.MonkeyPatch.context() as patch, Peak() as peak:
        before(patch, DeepSpeedZeroOptimizer, "_update_model_bit16_weights", lambda *_: flat.append(own_bytes()))
        at_first = own_bytes()
        engine = cases.build(chosen, begun, directory)
    engine.close()
    return peak.grown, flat[0] - at_first


@pytest.mark.everyday("directory")
@pytest.mark.parametrize("begun", ["directory", "random"])
def test_weights_are_never_there_twice(tmp_path, begun):
    """Neither in fp32 nor beside their flat copy. Reading a weight takes a few copies of the largest in fp32."""
    chosen = cases.plan(2, precision="bf16", spec=spec(), gradient_accumulation_steps=1, dp=1)
    workload = Workload(spec(), chosen.cluster, dataclasses.replace(chosen.job, objective="sft"), chosen.layout)
    total, load, largest = workload.parameters[0].total, parts_of(workload, 0).load, 2048 * 512
    assert load == (2 + 4 + 4) * total  # weights, master weights, and gradients that DeepSpeed makes and frees
    path = cases.hf_directory(tmp_path, spec=spec()) if begun == "directory" else None
    ((most, flat),) = pool("deepspeed", 1).run(weigh, chosen, path, tmp_path)
    assert flat == pytest.approx(2 * total + 2 * largest, abs=4 * largest)
    assert most == pytest.approx(load, abs=3 * 4 * largest)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_share_memory_until_they_are_flat(stage, tied):
    """Of stage 0 nothing copies them, so each has memory of its own."""
    spec = tiny.model(tied_embeddings=tied, ffn_hidden_size=400)  # whose largest matrix is not the first
    model = whole_model(spec, stage, torch.bfloat16, torch.device("cpu"))
    parameters = list(model.parameters())
    assert len({each.untyped_storage().data_ptr() for each in parameters}) == (1 if stage else len(parameters))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert len(parameters) == len(list(random_model(spec, 0).parameters()))


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "qwen3"])
def test_buffers_are_those_of_a_model_that_deepspeed_casts(family):
    """DeepSpeed casts parameters and leaves buffers alone, as Gemma's factor of the embedding."""
    spec = tiny.model(family)
    model = whole_model(spec, 2, torch.bfloat16, torch.device("cpu"))
    plain = random_model(spec, 0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for (name, found), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(found, expected), name
        assert found.dtype == expected.dtype


@pytest.mark.everyday("1")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_random_weights_are_those_of_a_cast_model(tmp_path, stage):
    """On every rank, though rank 0 alone has built the model."""
    chosen = cases.plan(stage, precision="bf16")
    plain = random_model(chosen.model, tiny.run_directory(tmp_path, chosen).run.seed)
    expected = {name: parameter.detach().bfloat16().float() for name, parameter in plain.named_parameters()}
    assert all(
        same(found, expected) for found in pool("deepspeed", 2).run(cases.inside, chosen, None, tmp_path, weights)
    )


def weights(engine, chosen):
    return {name: parameter.detach().float().clone() for name, parameter in engine.modules()[""].named_parameters()}
