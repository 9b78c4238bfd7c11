"""Adafactor's state as a second moment: the factors of a matrix, and the matrix that they stand for."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch


def second_moment(state: MutableMapping[str, torch.Tensor]) -> torch.Tensor:
    """The second moment, of the parameter's shape (torch/optim/_adafactor.py, _single_tensor_adafactor): of a vector
    the live state, of a matrix the product of its means of rows and columns."""
    if "variance" in state:
        return state["variance"]
    rows = state["row_var"]
    return rows @ state["col_var"] / rows.mean(dim=-2, keepdim=True).clamp(min=torch.finfo().tiny)


def set_second_moment(state: MutableMapping[str, torch.Tensor], value: torch.Tensor) -> None:
    """Inverse of ``second_moment``, up to rounding."""
    if "variance" in state:
        state["variance"].copy_(value)
    else:
        state["row_var"].copy_(value.mean(dim=-1, keepdim=True))
        state["col_var"].copy_(value.mean(dim=-2, keepdim=True))
