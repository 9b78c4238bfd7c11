"""Runs that repeat bit for bit: ``run.deterministic``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def prepare(wanted: bool) -> None:
    """Set cuBLAS's workspace. Call this before the first use of CUDA: cuBLAS reads the setting in its first call
    (CUDA's notes on reproducibility), and torch refuses deterministic GEMMs without it."""
    if wanted:
        os.environ.setdefault(_WORKSPACE, ":4096:8")


@contextmanager
def chosen(wanted: bool) -> Iterator[None]:
    """While entered with ``wanted``, torch uses deterministic kernels only, and raises RuntimeError if there is none.

    Runs on CPUs repeat without it. On GPUs the order of atomic additions varies.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic  # a module with a property
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # would choose kernels by time
    memory.fill_uninitialized_memory = False  # a debugging aid that fills every new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        memory.fill_uninitialized_memory = fill
