"""Bits that repeat: ``run.deterministic``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def prepare(wanted: bool) -> None:
    """Call before CUDA is used: cuBLAS reads its workspace setting at its first call (CUDA's notes on reproducibility;
    torch refuses GEMMs without it)."""
    if wanted:
        os.environ.setdefault(_WORKSPACE, ":4096:8")


@contextmanager
def chosen(wanted: bool) -> Iterator[None]:
    """While entered, torch takes deterministic kernels only, and raises RuntimeError where there is none.

    Without it a run on CPU processes repeats all the same; on GPUs the order of atomic additions differs.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic  # a module with a property
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it chooses kernels by time
    memory.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        memory.fill_uninitialized_memory = fill
