"""What optimizers really hold after a step, beside the bytes per parameter that memory is predicted with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import bitsandbytes
import pytest
import torch

from kit.cost.memory.states import NF4_TWICE_BYTES
from kit.specs.job import OptimizerName
from kit.specs.optimizers import OPTIMIZERS as TRAITS

ROWS, COLUMNS = 1024, 2048
"""Sizes of a matrix: large enough for the 8-bit optimizer (which leaves tensors below 4,096 elements in 32 bits)."""


def _matrix(name: OptimizerName = "adamw") -> torch.nn.Parameter:
    # Muon multiplies matrices in bf16, which takes a processor half a minute; its state is the same share of any size.
    part = 16 if name == "muon" else 1
    return torch.nn.Parameter(torch.ones(ROWS // part, COLUMNS // part))


def _held(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> float:
    """Bytes of optimizer state per parameter, counters and tables of codes (the same for any size) apart."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [
        value.untyped_storage()
        for parameter in parameters
        for name, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and name not in ("step", "qmap1", "qmap2")
    ]
    once = {storage._cdata: storage.nbytes() for storage in held}
    return sum(once.values()) / sum(parameter.numel() for parameter in parameters)


OPTIMIZERS: dict[OptimizerName, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "adamw-8bit": lambda parameters: bitsandbytes.optim.AdamW8bit(parameters),
    "paged-adamw-8bit": lambda parameters: bitsandbytes.optim.PagedAdamW8bit(parameters),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "lion": lambda parameters: bitsandbytes.optim.Lion(parameters),
    "lion-8bit": lambda parameters: bitsandbytes.optim.Lion8bit(parameters),
    "muon": lambda parameters: torch.optim.Muon(parameters),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_a_matrix(name: OptimizerName) -> None:
    parameters = [_matrix(name)]
    # Adafactor's sums of rows and columns are left out of the model: 0.6 % of what Adam holds for this matrix.
    assert _held(OPTIMIZERS[name](parameters), parameters) == pytest.approx(TRAITS[name].moments.matrices, abs=0.012)


@pytest.mark.parametrize(("doubly", "expected"), [(False, 0.5 + 4 / 64), (True, NF4_TWICE_BYTES)])
def test_a_matrix_in_four_bits(doubly: bool, expected: float) -> None:
    """kit's engines quantise the scales too (kit/engines/huggingface/adapters.py), litgpt's plain nf4 does not."""
    weight = torch.ones(ROWS, COLUMNS)
    weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=doubly)
    quantised = weight.to("cpu")
    scales = [quantised.quant_state.absmax]
    if doubly:
        scales.append(quantised.quant_state.state2.absmax)
    assert sum(each.untyped_storage().nbytes() for each in [quantised, *scales]) / (ROWS * COLUMNS) == expected
