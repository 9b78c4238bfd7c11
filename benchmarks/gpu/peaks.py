"""Peak rates of the machine, compared with the catalog: GEMMs, copies, links, memory, disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import machine
from benchmarks.gpu.measured import timed_steps
from kit.cost.hardware import shared

SIDE = {"cuda": 8192, "cpu": 512}
"""Rows of the square matrices of the GEMM: large enough for a GPU's full rate."""
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**24}
DISK_BYTES = {"cuda": 2**31, "cpu": 2**24}


def measure(_: str, device: str, scratch: Path) -> dict[str, Any]:
    """A list of peaks, each with the measured figure, the catalog's figure, and their meaning."""
    cluster = machine(device, scratch)
    gpu, size = cluster.gpu, COPIED_BYTES[device]
    rows = [_product(device, gpu.bf16_tflops), _copy("copy on the device", device, size, gpu.hbm_gbytes_per_s)]
    if device == "cuda":
        rows += _links(size, gpu.pcie_gbytes_per_s)
    rows.append(_copy("host memory", "cpu", size, shared().host_memory_gbytes_per_s))
    rows += _disk(scratch, DISK_BYTES[device], cluster.nvme_gbytes_per_s or shared().nvme_gbytes_per_s)
    return {"gpu": gpu.name, "peaks": rows}


def _product(device: str, catalog: float) -> dict[str, Any]:
    side = SIDE[device]
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    seconds = _best(lambda: torch.mm(left, right, out=out), device)
    return _row("bf16 product", 2.0 * side**3 / seconds / 1e12, "TFLOP/s", catalog, f"{side}³")


def _copy(name: str, device: str, size: int, catalog: float) -> dict[str, Any]:
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    seconds = _best(lambda: target.copy_(source), device)
    return _row(name, 2.0 * size / seconds / 1e9, "GB/s", catalog, "read and written bytes together")


def _links(size: int, catalog: float) -> list[dict[str, Any]]:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    to_device = _best(lambda: device.copy_(host, non_blocking=True), "cuda")
    to_host = _best(lambda: host.copy_(device, non_blocking=True), "cuda")
    return [
        _row("PCIe, host to device", size / to_device / 1e9, "GB/s", catalog, "pinned memory"),
        _row("PCIe, device to host", size / to_host / 1e9, "GB/s", catalog, "pinned memory"),
    ]


def _disk(scratch: Path, size: int, catalog: float) -> list[dict[str, Any]]:
    """Writes and flushes one file, then reads it after dropping it from the page cache."""
    file, block = scratch / "disk.bin", os.urandom(2**22)
    began = time.perf_counter()
    with file.open("wb", buffering=0) as stream:
        for _ in range(size // len(block)):
            stream.write(block)
        os.fsync(stream.fileno())
        written_s = time.perf_counter() - began
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while stream.read(len(block)):
            pass
    read_s = time.perf_counter() - began
    file.unlink()
    note = "one thread, through the page cache; the swap of ZeRO-Infinity reads with several and around it"
    return [
        _row("disk, write", size / written_s / 1e9, "GB/s", None, note),
        _row("disk, read", size / read_s / 1e9, "GB/s", catalog, note),
    ]


def _best(work: Callable[[], Any], device: str, repeats: int = 10) -> float:
    """Seconds of the fastest of ``repeats`` calls, after two warm-up calls."""
    return min(timed_steps(lambda _: work(), device, repeats + 2)[2:])


def _row(name: str, measured: float, unit: str, catalog: float | None, note: str) -> dict[str, Any]:
    ratio = measured / catalog if catalog else None
    return {"name": name, "measured": measured, "unit": unit, "catalog": catalog, "ratio": ratio, "note": note}
