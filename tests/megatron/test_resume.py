"""Native save and load, and export and import of full tensors, continue training bit for bit."""

from __future__ import annotations

import pytest
import torch

from kit.cost.model.params import rank_experts, rank_parameters
from kit.engines.huggingface.buffers import is_buffer
from kit.engines.protocol import IGNORE_INDEX
from tests.megatron import cases, inside
from tests.megatron.shapes import DEEPSEEK
from tests.support import tiny
from tests.support.workers import pool
from tests.training.cases import not_to_the_bit, same

# name → family, shape, layout, job, edits of distributed_data_parallel
CASES = {
    "tp2-sp-bf16": ("llama", {}, {"tp": 2, "sp": True}, {"precision": "bf16"}, {}),
    "dp2-distributed-optimizer": ("llama", {}, {"dp": 2, "zero_stage": 1}, {}, {}),
    # 5,000 parameters a bucket: several, all padded, where megatron-core's fully_reshardable format corrupts.
    "dp2-many-buckets-bf16-qwen3": (
        "qwen3",
        {},
        {"dp": 2, "zero_stage": 1},
        {"precision": "bf16"},
        {"bucket_size": 5000},
    ),
    "dp2-half-of-the-optimizer-on-the-host": (
        "llama",
        {},
        {"dp": 2, "zero_stage": 1, "offload_optimizer": "cpu", "optimizer_offload_fraction": 0.5},
        {"precision": "bf16"},
        {},
    ),
    "ep2-tp2-sp-mixtral": ("mixtral", {"num_layers": 2}, {"tp": 2, "sp": True, "ep": 2}, {}, {}),
    "ep2-distributed-optimizer-mixtral": ("mixtral", {"num_layers": 2}, {"dp": 2, "ep": 2, "zero_stage": 1}, {}, {}),
    "pp2-vp2-tied": ("llama", {"tied_embeddings": True}, {"pp": 2, "vp": 2}, {}, {}),
}


@pytest.mark.everyday("dp2-half-of-the-optimizer-on-the-host", "ep2-distributed-optimizer-mixtral")
@pytest.mark.parametrize("name", CASES)
def test_resumes_bit_for_bit(references, tmp_path, name):
    family, shape, layout, job, edits = CASES[name]
    spec = tiny.model(family, **({"num_layers": 4, "vocab_size": 127} | shape))
    rundir = cases.run_directory(references(spec)[0] / "run", spec, job=job, **layout)
    rundir.settings["distributed_data_parallel"] |= edits
    found = cases.resumed(rundir, tmp_path)[0]
    assert not_to_the_bit(found) == []
    for kind in cases.KINDS:
        assert found[kind].keys() == found["ended"].keys()
        assert {tensor.dtype for tensor in found[kind].values()} == {torch.float32}


def test_bf16_keeps_18_bytes_a_parameter(references, tmp_path):
    """bf16 weights, fp32 gradients, fp32 masters and moments: 2 + 4 + 12 bytes."""
    spec = tiny.model("llama", num_layers=4, vocab_size=127)
    rundir = cases.run_directory(references(spec)[0] / "run", spec, job={"precision": "bf16"}, tp=2)
    held = pool("megatron", 2).run(cases.inside, rundir, inside.memory_bytes)[0]
    weights = held["weights"] // 2
    assert held == {"weights": 2 * weights, "gradients": 4 * weights, "optimizer": 12 * weights}


def test_a_routers_correction_stays_in_fp32_beside_weights_in_bf16(references):
    spec = tiny.model("deepseek_v3", **{"num_layers": 2, "vocab_size": 127} | DEEPSEEK)
    directory, expected = references(spec)
    rundir = cases.run_directory(directory / "run", spec, job={"precision": "bf16"}, tp=2, sp=True, ep=2)
    weights = pool("megatron", 2).run(cases.inside, rundir, inside.initial_weights)[0]
    (name,) = (name for name in weights if is_buffer(name))
    assert torch.equal(weights[name], expected.initial[name])


def test_a_summary_has_the_memory_of_the_fullest_rank(references):
    spec = tiny.model("llama", num_layers=3, vocab_size=127)
    rundir = cases.run_directory(references(spec)[0] / "run", spec, pp=2, first_stage_layers=1)
    told, held = zip(*pool("megatron", 2).run(cases.inside, rundir, inside.memory_told), strict=True)
    assert held[0] < held[1]
    assert told == (max(held),) * 2


def test_a_group_that_holds_nothing_on_a_rank_counts_its_steps_too():
    assert pool("megatron", 2).run(inside.counts_of_groups) == [[1, 1]] * 2


def test_a_rank_holds_the_experts_that_the_planner_counts(references):
    spec = tiny.model("mixtral", num_layers=2, vocab_size=127)
    rundir = cases.run_directory(references(spec)[0] / "run", spec, tp=2, sp=True, ep=2)
    counted = rank_parameters(spec, tp=2, pp=1, stage=0) + rank_experts(spec, pp=1, ep=2, etp=1)
    assert (
        pool("megatron", 2).run(cases.inside, rundir, inside.memory_bytes)
        == [{"weights": 4 * counted, "gradients": 4 * counted, "optimizer": 8 * counted}] * 2
    )


def test_fresh_weights_do_not_depend_on_the_layout(references):
    spec = tiny.model("llama", num_layers=4, vocab_size=127)
    path = references(spec)[0] / "run"
    rundirs = [cases.run_directory(path, spec, **layout, model_path=None) for layout in ({"tp": 2}, {"pp": 2})]
    tensors = [pool("megatron", 2).run(cases.inside, each, inside.initial_weights)[0] for each in rundirs]
    assert same(*tensors)
    assert torch.equal(tensors[0]["model.norm.weight"], torch.ones(spec.hidden_size))
    assert tensors[0]["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_evaluate_takes_any_number_of_micro_batches_and_changes_nothing(references):
    spec = tiny.model("llama", num_layers=4, vocab_size=127)
    directory, expected = references(spec)
    rundir = cases.run_directory(directory / "run", spec, pp=2, vp=2)
    found = pool("megatron", 2).run(cases.inside, rundir, inside.evaluate)
    assert found[0] == found[1]
    whole, three, after_step = found[0]
    assert (whole.mean, whole.tokens) == (pytest.approx(expected.losses[0], rel=1e-6), expected.tokens[0])
    _, labels = cases.step_batch(127, 0)
    assert three.tokens == (labels[:6] != IGNORE_INDEX).sum(), "what fills up a round does not count"
    assert after_step == pytest.approx(expected.losses[1], rel=1e-5)
