"""ZeRO over Megatron's tensor parallelism against plain torch, on 2 processes that cut every matrix.

Four processes, with data parallelism beside it: ``python -m tests.system.parity.deepspeed``.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from kit.emit.run_directory import files_of
from tests.deepspeed import cases, plain
from tests.support import tiny
from tests.support.workers import pool

STEPS = 3
TOLERANCE = 1e-5


def plan(stage, **layout):
    """Tensor parallelism 2, four micro batches of 2."""
    split = {"implementation": "local", "tp": 2, "dp": 1, "gradient_accumulation_steps": 4}
    return cases.plan(stage, **(split | layout))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cases.hf_directory(tmp_path_factory.mktemp("start"))


def run(case, *arguments):
    # megatron's processes: its table of patches for the CPU is what they have and DeepSpeed's do not.
    return pool("megatron", 2).run(case, *arguments)


LAYOUTS = {
    "stage 1": plan(1),
    "stage 2, sequence parallel, optimizer on the host": plan(2, sp=True, offload_optimizer="cpu"),
    "stage 3, sequence parallel, recompute": plan(3, sp=True, recompute="full"),
}


@pytest.mark.everyday("stage 1")
@pytest.mark.parametrize("chosen", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_fp32_is_plain_torch(chosen, start, tmp_path):
    curve, expected = run(cases.train, chosen, start, tmp_path, STEPS)[0], plain.reference(start, STEPS)
    assert plain.gradient_error(curve, expected) < TOLERANCE
    assert plain.curve_error(curve.losses, expected.losses) < TOLERANCE
    assert plain.curve_error(curve.norms, expected.norms) < TOLERANCE


def test_norms_of_heads_get_the_gradient_of_all_heads(tmp_path):
    """Qwen3: each tensor-parallel rank has a part of the heads, and the norm is one for all."""
    spec = tiny.model("qwen3")
    start = cases.hf_directory(tmp_path, spec=spec)
    curve, expected = run(cases.train, plan(1, spec=spec), start, tmp_path, 2)[0], plain.reference(start, 2)
    assert plain.gradient_error(curve, expected) < TOLERANCE


def test_rows_that_data_parallel_ranks_do_not_divide_are_all_exported(tmp_path):
    """63 rows of the vocabulary on each of two tensor-parallel ranks, over two data-parallel ones."""
    spec = tiny.model(vocab_size=126)
    start = cases.hf_directory(tmp_path, spec=spec)
    found = pool("megatron", 4).run(cases.initial, plan(1, dp=2, spec=spec), start, tmp_path)[0]
    for name, tensor in load_file(start / "model.safetensors").items():
        assert torch.equal(found[name], tensor), name


def test_tied_embeddings_at_stage_3(tmp_path):
    """The output layer uses a parameter of another module, which ZeRO-3 must gather for it."""
    start = cases.hf_directory(tmp_path, tied=True)
    curve, expected = run(cases.train, plan(3, tied=True), start, tmp_path, 2)[0], plain.reference(start, 2)
    assert plain.gradient_error(curve, expected) < TOLERANCE


def test_bf16_is_near_plain_fp32(start, tmp_path):
    """The bounds of the other layouts (test_parity.py): frequencies of RoPE in bf16 alone would be 1 %."""
    curve, expected = run(cases.train, plan(3, precision="bf16"), start, tmp_path, 3)[0], plain.reference(start, 3)
    assert 1e-4 < plain.gradient_error(curve, expected) < 2e-2
    assert plain.curve_error(curve.losses, expected.losses) < 2e-4


@pytest.mark.nightly
def test_training_goes_on_through_the_exchange_checkpoint(start, tmp_path):
    whole, resumed = run(cases.through_the_exchange_checkpoint, plan(2), plan(3, sp=True), start, tmp_path)[0]
    assert plain.curve_error(resumed.losses, whole.losses) < 1e-6
    assert plain.curve_error(resumed.norms, whole.norms) < 1e-6
    for name, master in whole.masters.items():
        assert torch.allclose(resumed.masters[name], master, rtol=1e-5, atol=1e-7), name


@pytest.mark.nightly
def test_native_save_and_load_are_exact(start, tmp_path):
    losses, again, different = run(cases.natively, plan(3, sp=True), start, tmp_path)[0]
    assert again == losses
    assert different == []


@pytest.mark.nightly
def test_discard_and_evaluate_leave_no_trace(start, tmp_path):
    plain, disturbed = run(cases.disturb, plan(2, sp=True), start, tmp_path)[0]
    assert disturbed == plain


def test_a_run_directory_has_both_projections():
    files = files_of(plan(2))
    assert '"stage": 2' in files["ds_config.json"]
    assert "tensor_model_parallel_size: 2" in files["megatron.yaml"]
    assert "optimizer" not in files["megatron.yaml"]
