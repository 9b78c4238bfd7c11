"""DDP's compressed gradients, on two processes: bf16 within its rounding, PowerSGD as its rank allows; both train."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from kit.cost.collectives import POWERSGD_RANK
from kit.engines.protocol import StateKind
from kit.engines.torch.ddp import Compression
from kit.engines.torch.engine import TorchEngine
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.batches import micro_batches

STEPS = 24


def train(kind: str, directory, resume_at: int | None = None, total: int = STEPS):
    """Losses of a repeated batch, the gradients of the first step and of the last, and how many bytes PowerSGD left."""
    torch.manual_seed(0)
    plan = tiny.plan(dp=2, gradient_accumulation_steps=2, gradient_compression=kind)
    with closing(TorchEngine(tiny.run_directory(directory, plan, steps=total))) as engine:
        if resume_at is not None:
            engine.set_optimizer_steps(resume_at)
        losses, first = [], {}
        for _ in range(STEPS):
            own = micro_batches(0, mbs=2, accumulation=2, dp_rank=engine.dp_rank, dp_size=2)
            losses.append(engine.forward_backward(own).mean)
            gradients = cases.state(engine, StateKind.GRADIENT)
            first = first or gradients
            engine.apply(3e-3)
        state = engine._compression._state
        sent = None if state is None else (state.compression_stats()[0], state.start_powerSGD_iter)
    return losses, first, gradients, sent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compression")
    workers = pool("torch", 2)
    return {kind: workers.run(train, kind, directory / kind)[0] for kind in ("none", "bf16", "powersgd")}


def error(gradients, expected) -> float:
    return max(float((gradients[n] - g).norm() / g.norm()) for n, g in expected.items())


def test_bf16_rounds_and_no_more(found):
    # Something was rounded, and by no more than half a unit twice.
    assert 1e-5 < error(found["bf16"][1], found["none"][1]) < 2**-8
    assert found["bf16"][0][-1] == pytest.approx(found["none"][0][-1], rel=2e-2)


def test_powersgd_waits_then_compresses_and_still_trains(found):
    losses, first, last, (rate, start) = found["powersgd"]
    assert start == 2
    assert error(first, found["none"][1]) < 1e-6  # the first steps go as they are
    assert rate > 2  # and then less than half of it is sent
    ranks = {name: int(torch.linalg.matrix_rank(g.float(), rtol=1e-4)) for name, g in last.items() if g.ndim == 2}
    assert min(ranks.values()) == POWERSGD_RANK
    # Random tokens to learn by heart, the hardest for a low rank: it learns them, and more slowly.
    assert found["none"][0][-1] < losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("total", "done", "left"), [(24, 0, 2), (10_000, 0, 1000), (5000, 0, 500), (5000, 300, 200), (5000, 900, 2)]
)
def test_where_powersgd_starts(total, done, left):
    assert Compression("powersgd", total).start_after(done) == left


def test_steps_that_nobody_named_follow_from_the_tokens(one_process, tmp_path):
    """A million tokens, 64 in each step."""
    assert TorchEngine(tiny.run_directory(tmp_path, tiny.plan(), steps=None))._compression.total_steps == 15625


def test_a_resumed_run_goes_on_compressing(tmp_path):
    """A tenth of 60 steps goes as it is, and was over before step 20."""
    _, _, _, (rate, start) = pool("torch", 2).run(train, "powersgd", tmp_path, 20, 60)[0]
    assert start == 2
    assert rate > 2
