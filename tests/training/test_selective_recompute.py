"""Selective recompute on torch: the gradients of a run without it, and what is computed once and twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from kit.engines.kernels.selective_recompute import _ATTENTION, _PRODUCTS
from kit.engines.protocol import StateKind
from kit.engines.torch.engine import TorchEngine
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases
from tests.training.batches import micro_batches

CASES: dict[str, dict[str, Any]] = {
    "llama": {"zero_stage": 3, "dp": 2},
    "gpt2": {"zero_stage": 2, "dp": 2, "chunked_loss": True},
    "phi3": {"dp": 2},
}


@pytest.mark.everyday("llama")
@pytest.mark.parametrize("family", CASES)
def test_equals_a_run_without_it(tmp_path: Path, family: str) -> None:
    """To the bit: what is computed again is computed as before. Layouts without recompute are compared with one process
    elsewhere."""
    plans = (
        tiny.plan(tiny.model(family), gradient_accumulation_steps=2, recompute=kind, **CASES[family])
        for kind in ("none", "selective")
    )
    whole, found = (
        pool("torch", 2).run(cases.train, tiny.run_directory(tmp_path / plan.layout.recompute, plan))[0]
        for plan in plans
    )
    for key in ("gradients", StateKind.MASTER):
        assert found[key].keys() == whole[key].keys() != set()
        assert cases.worst(found[key], whole[key]) == 0.0, key


class _Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_process")
def test_attention_and_every_second_product_are_computed_once(tmp_path: Path) -> None:
    """Of two layers of Llama: seven products each in forward, three again in backward (keys, output, up), and two
    gradients of each; the head has one and two. Full recompute stops before the last one, whose result nothing needs.
    """
    found = {}
    for kind in ("none", "selective", "full"):
        engine = TorchEngine(tiny.run_directory(tmp_path / kind, tiny.plan(recompute=kind, micro_batch_size=2)))
        with _Counting() as counting:
            engine.forward_backward(micro_batches(0, mbs=2, accumulation=1))
        engine.discard()
        found[kind] = (
            sum(counting.found[each] for each in _PRODUCTS),
            sum(counting.found[each] for each in _ATTENTION),
        )
    products = 3 * (2 * 7 + 1)
    assert found == {"none": (products, 2), "selective": (products + 2 * 3, 2), "full": (products + 2 * 6, 4)}
