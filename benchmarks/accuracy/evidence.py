"""Evidence other than published rows: measured tensors of DeepSpeed, and the probe. One stratum for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.accuracy.strata import grouped
from tests.support.page import table

RESULTS = Path(__file__).resolve().parents[1] / "results"
BYTES = """
## Engine bytes: DeepSpeed

Bytes per parameter of weights, gradients, optimizer state and buffers in two real CPU processes, for
every ZeRO stage and offload, in device memory, host memory and on disk ([all
terms](deepspeed-bytes.md)).
"""
PROBE = """
## Probe: local and Hugging Face implementations

The probe runs the real model code of full-size plans on fake tensors ([all plans](probe.md)). It shows
what layers and engines save, not what CUDA, its libraries and the allocator add.
"""
NOTHING = 0.01
"""Bytes per parameter below which a term counts as zero (benchmarks/accuracy/deepspeed_bytes)."""


def evidence_lines() -> list[str]:
    """Markdown of both strata."""
    kinds = grouped(
        (f"ZeRO, {term['name'].split(',')[0].split('.')[-1]}", term["predicted"] / max(term["measured"], 1e-9) - 1)
        for term in _read("deepspeed-bytes.json")
        if max(term["predicted"], term["measured"]) >= NOTHING
    )
    probed = grouped(
        (f"{row['implementation']}, {part}", row[f"{part}_error"])
        for row in _read("probe.json")
        for part in ("states", "activations")
        if row[f"{part}_error"] is not None
    )
    return [*BYTES.strip().splitlines(), "", _errors(kinds, "terms"), "", *PROBE.strip().splitlines(), "",
            _errors(dict(sorted(probed.items())), "stages")]  # fmt: skip


def _errors(kinds: dict[str, list[float]], unit: str) -> str:
    rows = []
    for name, errors in kinds.items():
        sizes = sorted(abs(error) for error in errors)
        middle, ninth = sizes[len(sizes) // 2], sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        rows.append((name, len(sizes), f"{middle:.2%}", f"{ninth:.2%}", f"{sizes[-1]:.1%}"))
    return table(("stratum", unit, "median", "90th percentile", "largest"), rows)


def _read(name: str) -> list[dict[str, Any]]:
    return list(json.loads((RESULTS / name).read_text(encoding="utf-8")))
