"""The moments in an optimizer's state of one parameter: under which name each is, and the factors of Adafactor."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kit.engines.protocol import StateKind

_NAMES = {StateKind.EXP_AVG: ("exp_avg", "momentum_buffer"), StateKind.EXP_AVG_SQ: ("exp_avg_sq", "variance")}
"""Adam's and Lion's name; SGD's and Muon's, and Adafactor's of a vector."""


def live_moment(state: Mapping[str, torch.Tensor], kind: StateKind, parameter: torch.Tensor) -> torch.Tensor:
    """EXP_AVG or EXP_AVG_SQ, the tensor that the optimizer updates; zeros of one that it does not have."""
    name = next((name for name in _NAMES[kind] if name in state), None)
    return torch.zeros_like(parameter) if name is None else state[name]


def is_factored(state: Mapping[str, torch.Tensor], kind: StateKind) -> bool:
    """Whether the state has the moment as Adafactor's means of a matrix' rows and columns."""
    return kind is StateKind.EXP_AVG_SQ and "row_var" in state


def second_moment(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The product of the means, of the matrix' shape (torch/optim/_adafactor.py, _single_tensor_adafactor)."""
    rows = state["row_var"]
    return rows @ state["col_var"] / rows.mean(dim=-2, keepdim=True).clamp(min=torch.finfo().tiny)


def set_second_moment(state: Mapping[str, torch.Tensor], value: torch.Tensor) -> None:
    """Inverse of ``second_moment``, up to rounding."""
    state["row_var"].copy_(value.mean(dim=-1, keepdim=True))
    state["col_var"].copy_(value.mean(dim=-2, keepdim=True))
