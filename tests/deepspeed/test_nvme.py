"""ZeRO-Infinity: the same curves with masters, moments and weights on a disk, and clear words where that cannot be.

DeepSpeed swaps nothing smaller than 1 MiB, so the model is as wide as that takes, and sub groups are cut small.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from kit.cost.model.params import count
from kit.emit.deepspeed import ds_config
from kit.engines.base import StateKind
from kit.errors import EngineError
from tests.deepspeed import cases, plain
from tests.support import tiny
from tests.support.workers import pool

STEPS = 3
TOLERANCE = 1e-5
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


def settings(chosen):
    """The emitted configuration with sub groups so small that there are several, on NVMe and in host memory."""
    config = copy.deepcopy(ds_config(chosen))
    config["zero_optimization"]["sub_group_size"] = 500_000
    return config


def saved(directory, chosen):
    from kit.engines.huggingface.models import build_model

    rundir = tiny.run_directory(directory / "seed", chosen)
    build_model(rundir, torch.float32, "cpu").save_pretrained(directory / "hf")
    return directory / "hf"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("start"), plan())


@pytest.fixture(scope="module")
def start_bf16(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("start"), plan("bf16"))


@pytest.fixture(scope="module")
def reference(start):
    return plain.reference(start, STEPS)


def run(case, *arguments):
    return pool("deepspeed", cases.WORLD_SIZE).run(case, *arguments)


PLACES = {
    "optimizer": OPTIMIZER,
    "all": ALL,
    "weights, optimizer in host memory": {"offload_optimizer": "cpu", "offload_param": "nvme"},
}


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    """Each place once: what it trained, what it held at the end, and where."""
    done = {}

    def once(place):
        if place not in done:
            directory = tmp_path_factory.mktemp("trained")
            done[place] = *run(train, plan(**PLACES[place]), start, directory)[0], directory
        return done[place]

    return once


@pytest.mark.everyday("optimizer")
@pytest.mark.parametrize("place", PLACES)
def test_fp32_is_plain_torch(place, trained, reference):
    curve, held, directory = trained(place)
    assert plain.gradient_error(curve, reference) < TOLERANCE
    assert plain.curve_error(curve.losses, reference.losses) < TOLERANCE
    assert plain.curve_error(curve.norms, reference.norms) < TOLERANCE
    assert held["nvme"] > 0
    assert not list(directory.glob("kit-*"))


def train(chosen, start, directory):
    engine = cases.build(chosen, start, directory, settings(chosen))
    curve = plain.Curve(*cases.advance(engine, chosen, 0, STEPS), cases.exported(engine, StateKind.MASTER))
    held = engine.held_bytes()
    engine.close()
    return curve, held


def test_bf16_is_that_of_host_memory(start_bf16, tmp_path):
    """NVMe runs the arithmetic of host memory: equal to the last bit."""
    curves = []
    for offload in (ALL, {"offload_optimizer": "cpu", "offload_param": "cpu"}):
        curves.append(run(train, plan(precision="bf16", **offload), start_bf16, tmp_path)[0][0])
    assert curves[0].losses == curves[1].losses
    assert curves[0].norms == curves[1].norms
    assert all(torch.equal(master, curves[1].masters[name]) for name, master in curves[0].masters.items())


def test_what_is_on_disk_is_not_in_memory(trained):
    """12 bytes of masters and moments a parameter, for all but norms; 4 of gradients and 4 of weights where a matrix
    has 1 MiB on each rank, which the attention's have not."""
    chosen = plan(**ALL)
    held = trained("all")[1]
    counts, model = count(chosen.model), chosen.model
    matrices = (counts.total - (2 * model.num_layers + 1) * model.hidden_size) / cases.WORLD_SIZE
    large = matrices - model.num_layers * counts.layer.attention / cases.WORLD_SIZE
    assert held["nvme"] == 12 * matrices + 8 * large
    assert held["optimizer"] < 0.001 * 12 * matrices


CHANGES = {"nvme → optimizer on nvme": (ALL, OPTIMIZER), "none → nvme": ({}, ALL)}
"""From NVMe to none: ``tests.system.parity.deepspeed --resumes``."""


@pytest.mark.everyday("nvme \\u2192 optimizer on nvme")
@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_training_goes_on_through_the_exchange_checkpoint(before, after, start, tmp_path):
    whole, resumed = run(through_the_exchange_checkpoint, plan(**before), plan(**after), start, tmp_path)[0]
    assert plain.curve_error(resumed.losses, whole.losses) < 1e-6
    assert plain.curve_error(resumed.norms, whole.norms) < 1e-6
    for name, master in whole.masters.items():
        assert torch.allclose(resumed.masters[name], master, rtol=1e-5, atol=1e-7), name


def through_the_exchange_checkpoint(before, after, start, directory):
    return cases.through_the_exchange_checkpoint(before, after, start, directory, settings)


@pytest.mark.nightly
def test_native_save_and_load_are_exact(start_bf16, tmp_path):
    losses, again, different = run(natively, plan(precision="bf16", **ALL), start_bf16, tmp_path)[0]
    assert again == losses
    assert different == []


def natively(chosen, start, directory):
    return cases.natively(chosen, start, directory, settings)


@pytest.mark.nightly
def test_discard_and_evaluate_leave_no_trace(start, tmp_path):
    plain, disturbed = run(disturb, plan(**ALL), start, tmp_path)[0]
    assert disturbed == plain


def disturb(chosen, start, directory):
    return cases.disturb(chosen, start, directory, settings)


def test_a_missing_library_is_named_before_anything_is_loaded(start, tmp_path):
    """Without headers the op cannot be built: the check that DeepSpeed makes is told to look elsewhere."""
    message = run(without_libaio, plan(**OPTIMIZER), start, tmp_path)[0]
    assert "install libaio-dev" in message
    assert "\n" not in message


def without_libaio(chosen, start, directory):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    has_function = AsyncIOBuilder.has_function
    AsyncIOBuilder.has_function = lambda self, name, libraries, **keywords: has_function(
        self, name, ("aio_is_not_here",)
    )
    try:
        with pytest.raises(EngineError) as error:
            cases.build(chosen, start, directory, settings(chosen))
    finally:
        AsyncIOBuilder.has_function = has_function
    return str(error.value)
