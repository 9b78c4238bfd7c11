"""Muon's iteration in the predicted step: its GEMMs are those of the code, and no rank saves another one any."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kit.cost.time.step import MUON_STEPS, muon_gemms
from kit.engines.torch.gathered_optimizers import orthogonalised


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (64, 160), (224, 32)])
def test_the_iteration_multiplies_what_is_counted(inputs: int, outputs: int) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.ones(outputs, inputs, device="meta"))
    counted = sum(2 * rows * columns * inner for rows, columns, inner in muon_gemms(inputs, outputs))
    assert counter.get_total_flops() == MUON_STEPS * counted
