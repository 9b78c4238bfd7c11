"""Evidence other than published rows: measured tensors of DeepSpeed, and the probe. One stratum for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
NOTHING = 0.01
"""Bytes per parameter below which a term counts as zero (benchmarks/accuracy/deepspeed_bytes)."""


def evidence_lines() -> list[str]:
    """Markdown of both strata, or a line that results are missing."""
    return [*_engine_bytes(), "", *_probe()]


def _engine_bytes() -> list[str]:
    lines = ["## Engine bytes: DeepSpeed", ""]
    terms = _read("deepspeed-bytes.json")
    if not terms:
        return [*lines, "No results; `python -m benchmarks.accuracy.deepspeed_bytes` measures them."]
    kinds: dict[str, list[float]] = {}
    for term in terms:
        if max(term["predicted"], term["measured"]) >= NOTHING:
            place = term["name"].split(",")[0].split(".")[-1]
            kinds.setdefault(f"ZeRO, {place}", []).append(term["predicted"] / max(term["measured"], 1e-9) - 1)
    lines += [
        "Bytes per parameter of weights, gradients, optimizer state and buffers in two real CPU processes, for",
        "every ZeRO stage and offload, in device memory, host memory and on disk ([all",
        "terms](deepspeed-bytes.md)).",
        "",
    ]
    return lines + _errors(kinds, "terms")


def _probe() -> list[str]:
    lines = ["## Probe: local and Hugging Face implementations", ""]
    rows = _read("probe.json")
    if not rows:
        return [*lines, "No results; `python -m benchmarks.accuracy.probe` measures them."]
    kinds: dict[str, list[float]] = {}
    for row in rows:
        if row["states_error"] is not None:
            kinds.setdefault(f"{row['implementation']}, states", []).append(row["states_error"])
        kinds.setdefault(f"{row['implementation']}, activations", []).append(row["activations_error"])
    lines += [
        "The probe runs the real model code of full-size plans on fake tensors ([all plans](probe.md)). It shows",
        "what layers and engines save, not what CUDA, its libraries and the allocator add.",
        "",
    ]
    return lines + _errors(dict(sorted(kinds.items())), "stages")


def _errors(kinds: dict[str, list[float]], unit: str) -> list[str]:
    lines = [f"| stratum | {unit} | median | 90th percentile | largest |", "|---|---|---|---|---|"]
    for name, errors in kinds.items():
        sizes = sorted(abs(error) for error in errors)
        ninth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        middle = sizes[len(sizes) // 2]
        lines.append(f"| {name} | {len(sizes)} | {middle:.2%} | {ninth:.2%} | {sizes[-1]:.1%} |")
    return lines


def _read(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found
