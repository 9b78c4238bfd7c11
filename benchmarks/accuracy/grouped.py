"""Compact rows: a table states shared values once, and each row is a line of the table (``elsewhere.json``)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.accuracy.pipelines import Row

MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu")
APART = ("program", "notes")
"""Columns that are not part of ``job``. A ``program`` names an entry of the file, which describes the code that ran by
fields of ``PublishedExecution`` and ``PublishedWorkload``."""


def expanded(file: dict[str, Any]) -> list[Row]:
    """Rows of the usual schema. ``dp`` follows from the number of GPUs; equal runs get a number."""
    seen: Counter[str] = Counter()
    rows = []
    for group in file["groups"]:
        for values in group["rows"]:
            row = _row(group["common"], dict(zip(group["columns"], values, strict=True)), file.get("programs") or {})
            name = "-".join([group["prefix"], *_words(row, group["columns"])])
            seen[name] += 1
            rows.append({**row, "id": name if seen[name] == 1 else f"{name}-again{seen[name] - 1}"})
    return rows


def _row(common: dict[str, Any], line: dict[str, Any], programs: dict[str, Any]) -> Row:
    job = {**common["job"], **{name: value for name, value in line.items() if name not in (*MEASURED, *APART)}}
    job["dp"] = common["cluster"]["num_gpus"] // (job["tp"] * job["pp"] * job["cp"])
    measured = {name: line.get(name) for name in MEASURED}
    return {
        **common,
        "job": job,
        "measured": measured,
        "notes": line.get("notes") or "",
        "code": {"name": line["program"], **programs[line["program"]]} if "program" in line else None,
        "check": {"implied_step_time_s": _implied_s(common, job, measured["model_tflops_per_gpu"])},
    }


def _implied_s(common: dict[str, Any], job: dict[str, Any], tflops: float | None) -> float | None:
    """Step time from TFLOP/s, with the source's own FLOPs per token."""
    if tflops is None:
        return None
    tokens = job["global_batch_size"] * common["model"]["seq_length"]
    gflop = tokens * common["check"]["flops_per_token_gflop"]
    return float(gflop / 1e3 / (tflops * common["cluster"]["num_gpus"]))


def _words(row: Row, columns: list[str]) -> list[str]:
    """Values that distinguish a row from the other rows of its table."""
    job = row["job"]
    words = (
        *(f"{name}{job[name]}" for name in ("tp", "pp", "vp", "cp", "ep") if name in columns and job[name]),
        f"mb{job['micro_batch_size']}",
        "sp" if job.get("sp") and "sp" in columns else "",
        "recompute" if job["recompute"] == "full" else "",
        row["code"]["name"].replace(" ", "-") if row["code"] else "",
        "overlapped" if "overlapped" in row["notes"] else "",
    )
    return [word for word in words if word]
