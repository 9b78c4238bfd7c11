"""Liger's fused linear cross entropy (Hsu et al. 2024, arXiv 2410.10989), for ``loss_kernel=liger``.

tests/training/test_liger.py compares loss and gradients in Triton's interpreter; no test runs it on a GPU. Liger makes
the host wait once per micro batch, for the number of labels; kit's own loss does not wait.
"""

from __future__ import annotations

import importlib.util

import torch

from kit.cost.workload import liger_chunk
from kit.engines.base import IGNORE_INDEX
from kit.errors import EngineError


def check_installed() -> None:
    """Raises EngineError where liger-kernel or Triton is missing."""
    missing = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineError(
            f"loss_kernel=liger needs {' and '.join(missing)}, not installed; pip install liger-kernel, or leave it out"
        )


def liger_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Cross entropy in nats, summed over the labels that are not ``IGNORE_INDEX``: an fp32 scalar. Sums gradients in
    fp32.

    ``hidden``: (…, h); ``weight``: (vocabulary, h); ``labels``: (…).
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    flat = hidden.reshape(-1, hidden.shape[-1])
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        flat = flat.to(torch.get_autocast_dtype(kind))
    budget, _ = liger_chunk(len(flat), *weight.shape)
    softcap, reduction, accumulated_in = None, "sum", torch.float32
    loss = LigerFusedLinearCrossEntropyFunction.apply(
        flat, weight, labels.reshape(-1), bias, None, IGNORE_INDEX, 0.0, 0.0, reduction, softcap, False, accumulated_in,
        False, False, False, None, None, budget,
    )  # fmt: skip
    return loss[0]
