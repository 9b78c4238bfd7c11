"""Heads of multi-token prediction train on every layout as plain transformers and torch compute them."""

from __future__ import annotations

import functools
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import kit
from kit.cost.model.params import count
from kit.engines.huggingface.buffers import is_buffer
from kit.engines.huggingface.models import HfDirectory
from kit.errors import SpecError
from kit.specs.job import BalancingSpec
from kit.training.checkpoint.to_huggingface import write_hf
from tests.megatron import cases, inside
from tests.megatron.conftest import steps
from tests.megatron.prediction_heads import loss_of_heads, model_with_heads
from tests.megatron.shapes import DEEPSEEK, GLM
from tests.support import tiny
from tests.support.refusals import refusal
from tests.support.workers import pool
from tests.training.cases import not_to_the_bit

FACTOR = 0.3
BARELY_BALANCED = BalancingSpec(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1e-12)
SHAPE = {"num_layers": 2, "vocab_size": 127}
MODELS = {
    "deepseek": ("deepseek_v3", SHAPE | DEEPSEEK | {"mtp_num_layers": 1}),
    "deepseek-two-heads": ("deepseek_v3", SHAPE | DEEPSEEK | {"mtp_num_layers": 2}),
    "deepseek-four-layers": ("deepseek_v3", SHAPE | DEEPSEEK | {"num_layers": 4, "mtp_num_layers": 2}),
    "glm": ("glm4_moe", SHAPE | GLM | {"mtp_num_layers": 1}),
}
CASES = {
    "dp2": ("deepseek", {"dp": 2, "zero_stage": 1}),
    "tp2-sp-ep2": ("deepseek", {"tp": 2, "sp": True, "ep": 2}),
    "tp2-two-heads": ("deepseek-two-heads", {"tp": 2, "sp": True, "etp": 2}),
    "pp2": ("deepseek", {"pp": 2}),
    "pp2-uneven": ("deepseek", {"pp": 2, "first_stage_layers": 1}),
    "pp2-vp2-two-heads": ("deepseek-four-layers", {"pp": 2, "vp": 2}),
    "cp2-two-heads": ("deepseek-two-heads", {"cp": 2}),
    "recompute": ("deepseek", {"dp": 2, "recompute": "full"}),
    "tp2-sp-pp2-glm": ("glm", {"tp": 2, "sp": True, "pp": 2, "etp": 2}),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    @functools.cache
    def reference(name):
        family, shape = MODELS[name]
        spec, directory = tiny.model(family, **shape), tmp_path_factory.mktemp(name)
        model = model_with_heads(spec, directory / "model")
        heads = FACTOR, functools.partial(loss_of_heads, spec, model)
        return spec, directory, cases.reference(spec, model, steps(spec), heads=heads)

    return reference


def run_directory(references, name, factor=FACTOR, **job):
    model, layout = CASES[name]
    spec, directory, expected = references(model)
    job |= {"mtp_num_layers": spec.mtp_num_layers, "mtp_loss_scaling_factor": factor}
    return cases.run_directory(directory / "run", spec, job=job, **layout), expected


def problems(references, name, fault=None, **job):
    rundir, expected = run_directory(references, name, **job)
    workers = pool("megatron", rundir.plan.layout.world_size)
    found = workers.run(cases.train, rundir, len(expected.losses), False, fault)
    if rundir.plan.layout.cp == 1:  # else a rank has parts of sequences of which no label counts
        assert all(rank.routing["mtp_loss"] == pytest.approx(math.log(127), rel=0.1) for rank in found)
    return cases.differences(found[0], expected)


@pytest.mark.everyday("pp2-vp2-two-heads", "tp2-sp-ep2")
@pytest.mark.parametrize("name", CASES)
def test_same_as_transformers(references, name):
    assert problems(references, name) == []


def test_a_balancing_loss_beside_it_does_not_scale_it(references):
    """The coefficient is so small that only the scaling of the losses could change a gradient."""
    assert problems(references, "dp2", balancing=BARELY_BALANCED) == []


@pytest.mark.parametrize(
    ("fault", "name", "shows_in"),
    [
        ("megatron-scaled-prediction-loss", "dp2", "gradients[model.layers.2.eh_proj.weight]"),
        ("megatron-lone-last-embedding", "pp2", "gradients[model.embed_tokens.weight]"),
    ],
)
@pytest.mark.nightly
def test_planted_faults_show(references, fault, name, shows_in):
    found = problems(references, name, fault, balancing=BARELY_BALANCED)
    assert any(problem.startswith(shows_in) for problem in found), found


@pytest.mark.everyday("pp2-uneven")
@pytest.mark.parametrize("name", ["pp2-uneven", "tp2-sp-ep2"])
@pytest.mark.nightly
def test_resumes_bit_for_bit(references, tmp_path, name):
    rundir, _ = run_directory(references, name)
    found = cases.resumed(rundir, tmp_path)[0]
    assert not_to_the_bit(found) == []
    assert "model.layers.2.eh_proj.weight" in found["ended"]


@pytest.mark.everyday("pp2-uneven")
@pytest.mark.parametrize("name", ["pp2-uneven", "tp2-sp-ep2"])
def test_a_rank_holds_the_parameters_that_the_planner_counts(references, name):
    rundir, _ = run_directory(references, name)
    held = pool("megatron", 2).run(cases.inside, rundir, inside.memory_bytes)
    counted = [4 * stage.total for stage in rundir.plan.workload.parameters] * 2
    assert [rank["weights"] for rank in held] == counted[:2]


def test_the_whole_model_has_the_parameters_that_the_planner_counts(references):
    spec, *_, expected = references("deepseek-two-heads")
    assert count(spec).total == sum(tensor.numel() for name, tensor in expected.masters.items() if not is_buffer(name))


def test_a_directory_is_written_as_deepseek_v3_is(references, tmp_path):
    """transformers loads the model without its heads; kit loads the heads too where the job trains them."""
    spec, directory, expected = references("deepseek")
    write_hf(spec, HfDirectory(directory / "model", prediction_heads=1), tmp_path / "out", dtype="float32")
    again = HfDirectory(tmp_path / "out", prediction_heads=1)
    assert set(again.names()) == set(expected.initial)
    assert all(torch.equal(again.read(name), tensor) for name, tensor in expected.initial.items())
    heads = {name for name in expected.initial if name.startswith("model.layers.2.")}
    assert set(HfDirectory(tmp_path / "out").names()) == set(expected.initial) - heads
    inputs, _ = cases.step_batch(spec.vocab_size, 0)
    with torch.no_grad():
        one, other = (
            AutoModelForCausalLM.from_pretrained(path)(inputs, use_cache=False).logits
            for path in (directory / "model", tmp_path / "out")
        )
    assert torch.equal(one, other)


def test_a_family_without_heads_is_refused():
    assert re.search(
        r"mtp_num_layers=1 of llama-3.1-8b.*use one of deepseek_v3, glm4_moe",
        refusal(SpecError, kit.plan, "llama-3.1-8b", "8xH100", kit.JobSpec(mtp_num_layers=1)),
    )
