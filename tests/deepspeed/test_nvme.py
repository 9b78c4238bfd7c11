"""ZeRO-Infinity: the same curves with masters, moments and weights on a disk, and clear words where that cannot be.

DeepSpeed swaps nothing smaller than 1 MiB, so the model is as wide as that takes, and sub groups are cut small.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import pytest

from kit.cost.model.params import count
from kit.engines.protocol import StateKind
from kit.errors import EngineError
from tests.deepspeed import cases, plain
from tests.deepspeed.cases import run
from tests.support.refusals import refusal

STEPS = 3
OPTIMIZER = {"offload_optimizer": "nvme"}
ALL = {"offload_optimizer": "nvme", "offload_param": "nvme"}


@pytest.fixture(scope="module", autouse=True)
def _async_io():
    """Compiling takes minutes: not in a test."""
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("libaio's headers are missing: apt-get install libaio-dev, then make prove NAME=ops")
    from kit.engines.deepspeed import ops

    if not ops.library().exists():
        pytest.skip("DeepSpeed's async_io op is not compiled yet: make prove NAME=ops (three minutes, once)")


def plan(precision="fp32", **offload):
    # In bf16 a CPU takes 70 ms for 32 tokens' gradient of a matrix's input, 8 ms for 4.
    few = {"seq_length": 4, "micro_batch_size": 1} if precision == "bf16" else {}
    chosen = cases.plan(3, precision=precision, **few, **offload)
    # A matrix is 1 MiB on each of two ranks.
    width = 2048 if precision == "fp32" else 4096
    wide = {"hidden_size": 256, "ffn_hidden_size": width, "head_dim": 64, "vocab_size": width}
    return dataclasses.replace(chosen, model=dataclasses.replace(chosen.model, **wide))


SMALL = {"sub_group_size": 500_000}
"""Several sub groups, on NVMe and in host memory."""


COUNTS = count(plan().model)
MATRICES = (COUNTS.total - (2 * plan().model.num_layers + 1) * plan().model.hidden_size) / cases.WORLD_SIZE
LARGE = MATRICES - plan().model.num_layers * COUNTS.layer.attention / cases.WORLD_SIZE
"""Parameters of a rank outside of norms, and those of matrices that have 1 MiB on each rank, as the attention's have
not."""
PLACES = {
    "optimizer": (OPTIMIZER, None),
    "all": (ALL, 12 * MATRICES + 8 * LARGE),
    "weights, optimizer in host memory": ({"offload_optimizer": "cpu", "offload_param": "nvme"}, None),
}
"""Layout, and bytes of swap files where all is there: 12 of masters and moments, 4 of gradients, 4 of weights."""


def train(chosen, start, directory):
    with closing(cases.build(chosen, start, directory, cases.resized(chosen, SMALL))) as engine:
        curve = plain.Curve(*cases.advance(engine, chosen, 0, STEPS), cases.exported(engine, StateKind.MASTER))
        return curve, engine.memory_bytes()


@pytest.mark.everyday("all")
@pytest.mark.parametrize("place", PLACES)
def test_fp32_is_plain_torch_and_what_is_on_disk_is_not_in_memory(place, references, tmp_path):
    layout, swapped = PLACES[place]
    start, expected = references(plan().model)
    curve, held = run(train, plan(**layout), start, tmp_path)
    assert plain.worst(curve, expected) < 1e-5
    assert held["nvme"] == (swapped or held["nvme"]) > 0
    assert (held["optimizer"] < 0.001 * 12 * MATRICES) == (layout["offload_optimizer"] == "nvme")
    assert not list(tmp_path.glob("kit-*"))


@pytest.mark.nightly
def test_bf16_is_that_of_host_memory(references, tmp_path):
    """NVMe runs the arithmetic of host memory: equal to the last bit."""
    start, _ = references(plan("bf16").model, 1)
    layouts = (ALL, {"offload_optimizer": "cpu", "offload_param": "cpu"})
    assert plain.worst(*[run(train, plan(precision="bf16", **offload), start, tmp_path)[0] for offload in layouts]) == 0


CHANGES = {"nvme to optimizer on nvme": (ALL, OPTIMIZER), "none to nvme": ({}, ALL), "nvme to none": (OPTIMIZER, {})}


@pytest.mark.everyday("nvme to optimizer on nvme")
@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.nightly
def test_training_goes_on_on_another_layout(before, after, references, tmp_path):
    whole = run(cases.leave, plan(**before), references(plan().model)[0], tmp_path, 2, SMALL, 2)
    resumed, different = run(cases.go_on, plan(**after), tmp_path / "step", tmp_path, 2, None, SMALL)
    assert different == []
    assert plain.worst(resumed, whole) < 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_goes_on_bit_for_bit(precision, references, tmp_path):
    start, _ = references(plan(precision).model, 1)
    found = run(cases.resumed, plan(precision=precision, **ALL), start, tmp_path, SMALL)
    assert (found["same bits"], found["again"], found["steps"]) == (True, found["after"], 5)


@pytest.mark.nightly
def test_discard_and_evaluate_leave_no_trace(references, tmp_path):
    undisturbed, disturbed = run(cases.disturb, plan(**ALL), references(plan().model)[0], tmp_path, SMALL)
    assert disturbed == undisturbed


def test_a_missing_library_is_named_before_anything_is_loaded(references, tmp_path):
    """Without headers the op cannot be built: the check that DeepSpeed makes is told to look elsewhere."""
    message = run(without_libaio, plan(**OPTIMIZER), tmp_path)
    assert "install libaio-dev" in message
    assert "\n" not in message


def without_libaio(chosen, directory):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    has_function = AsyncIOBuilder.has_function
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            AsyncIOBuilder, "has_function", lambda self, name, _, **kw: has_function(self, name, ("no",), **kw)
        )
        return refusal(EngineError, cases.build, chosen, None, directory)
