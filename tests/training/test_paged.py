"""AdamW with paged moments. No GPU runs here, and a CPU is refused, so its steps are those of the same kernel call on
ordinary tensors: bitsandbytes' own code for CPUs."""

from __future__ import annotations

import bitsandbytes.functional
import pytest
import torch

from kit.engines import eight_bit, paged
from kit.engines.base import StateKind
from kit.engines.torch import optimizer as optimizers
from kit.engines.torch import paged_adamw
from kit.engines.torch.optimizer import Optimizer
from kit.errors import EngineError
from kit.specs.job import OptimizerName, OptimizerSpec

RATE = 1e-2
SPEC = OptimizerSpec(name="adamw", eps=1e-3, weight_decay=0.5)
SHAPES = ((33, 65), (7,), (16, 8, 4), (0, 4))
"""A matrix, a bias, stacked experts, and the empty shard of a rank."""


@pytest.fixture
def unpaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary tensors instead of managed memory."""
    for module in (eight_bit, paged_adamw):
        monkeypatch.setattr(module, "paged_zeros", lambda like, dtype: torch.zeros(like.shape, dtype=dtype))


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def stepped(own: list[torch.nn.Parameter], spec: OptimizerSpec, is_paged: bool, steps: int = 4) -> Optimizer:
    found = Optimizer(own, spec, RATE, paged=is_paged)
    for step in range(steps):
        for parameter, gradient in zip(own, parameters(1 + step), strict=True):
            parameter.grad = gradient.detach()
        with torch.compiler.set_stance("force_eager"):
            found.step(RATE / (1 + step), None)
    return found


def error(found: list[torch.nn.Parameter], expected: list[torch.nn.Parameter]) -> float:
    pairs = [(a - b, b) for a, b in zip(found, expected, strict=True) if b.numel()]
    return max(float((apart.norm() / of.norm()).detach()) for apart, of in pairs)


@pytest.mark.usefixtures("unpaged")
class TestSteps:
    def test_they_are_torchs(self, monkeypatch):
        """Weights and moments after four steps, in pieces that end inside a matrix."""
        monkeypatch.setattr(eight_bit, "PIECE", 512)
        found, expected = parameters(), parameters()
        own, whole = stepped(found, SPEC, True), stepped(expected, SPEC, False)
        assert error(found, expected) < 1e-6
        for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
            assert error([own.moment(kind, p) for p in found], [whole.moment(kind, p) for p in expected]) < 1e-6

    def test_8_bits_are_those_of_the_unpaged_ones(self):
        found, expected = parameters(), parameters()
        for own, is_paged in ((found, True), (expected, False)):
            stepped(own, OptimizerSpec(name="adamw-8bit"), is_paged)
        assert error(found, expected) == 0.0

    def test_an_import_goes_into_the_state(self):
        """What is read is a copy on the weights' device: the state itself is a tensor of the CPU to torch, which
        collectives of a GPU do not take."""
        own = parameters()
        found = stepped(own, SPEC, True, steps=1)
        for parameter in own:
            moment = found.moment(StateKind.EXP_AVG, parameter).fill_(3.0)
            held = found.local_state(parameter)["exp_avg"]
            assert not (held == 3.0).any() or parameter.ndim == 1  # a vector's is torch's own
            found.store_moment(StateKind.EXP_AVG, parameter, moment)
            assert (held == 3.0).all()
        found.set_steps(7)
        assert {float(state["step"]) for state in found._state.values()} == {7.0}


def test_pieces_keep_the_mark_by_which_kernels_read_them() -> None:
    """bitsandbytes refuses a tensor of the CPU beside one of the GPU unless it is marked (functional.py, is_on_gpu)."""
    whole = torch.zeros(4, 4)
    whole.is_paged = True  # type: ignore[attr-defined]
    assert not hasattr(whole.view(-1)[:8], "is_paged")
    assert paged.is_paged(paged.part_of(whole, slice(0, 8)))
    assert not paged.is_paged(paged.part_of(torch.zeros(4), slice(0, 2)))


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])
def test_a_cpu_is_refused(name: OptimizerName) -> None:
    with pytest.raises(EngineError, match="on a CPU, where bitsandbytes warns and does not page"):
        optimizers.Optimizer(parameters(), OptimizerSpec(name=name), RATE, paged=True)


def test_an_empty_shard_asks_cuda_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        device, shape = torch.device("cuda", 0), torch.Size((0, 4))

        def numel(self) -> int:
            return 0

    monkeypatch.setattr(bitsandbytes.functional, "get_paged", lambda *_, **__: pytest.fail("no bytes were asked for"))
    assert paged.paged_zeros(OnCuda(), torch.float32).shape == (0, 4)  # type: ignore[arg-type]
