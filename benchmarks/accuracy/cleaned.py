"""Cleans rows of a data file: numbers written as text, missing or empty sections, duplicate names.

Unambiguous values are corrected; so is what a row's own source says otherwise (mended.json). A row with other errors is
not predicted, and states the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.accuracy.pipelines import NotPredictedError, Row

SECTIONS = ("source", "model", "cluster", "job", "measured", "check")
SIZES = {
    "model": (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "seq_length",
    ),
    "cluster": ("num_gpus", "gpus_per_node"),
    "job": ("tp", "pp", "vp", "cp", "ep", "etp", "dp", "micro_batch_size", "global_batch_size"),
}
"""Keys whose values are whole numbers above zero, or null."""
ENGINE_NAMES = {"megatron-core": "megatron", "megatron-lm": "megatron", "fsdp2": "fsdp", "torchtitan": "fsdp"}
"""Other names of an engine → its name in rows."""
EXPERTS = ("num_experts", "experts_per_token", "moe_ffn_hidden_size")
SPLIT = ("tp", "pp", "cp", "dp")
"""Parallel sizes whose product is the number of GPUs."""
MENDED = {
    name: (table["source"], sections)
    for table in json.loads(Path(__file__).with_name("mended.json").read_text(encoding="utf-8"))
    for name, sections in table["rows"].items()
}
"""Row → its source, and what that source says otherwise than the file of rows (the words are in mended.json)."""


def completed(rows: Iterable[Any]) -> list[Row]:
    """Fills in what reports need of every row. A row without a group is its own group; duplicate names get a number."""
    found: list[Row] = []
    names: dict[str, int] = {}
    for number, row in enumerate(rows):
        each = _row(row, number)
        names[each["id"]] = again = names.get(each["id"], 0) + 1
        if again > 1:
            each["id"] = f"{each['id']} ({again})"
        found.append(each)
    return found


def _row(row: Any, number: int) -> Row:
    if not isinstance(row, dict):
        row = {"damaged": f"a row is an object of sections, and this is {row!r:.60}"}
    name = str(row.get("id") or f"row {number}")
    sections = {key: row.get(key) or {} for key in SECTIONS}
    wrong = [key for key, section in sections.items() if not isinstance(section, dict)]
    damaged = row.get("damaged") or (f"{wrong[0]}={sections[wrong[0]]!r:.60} is no object" if wrong else None)
    sections |= {key: {} for key in wrong}
    source, mended = MENDED.get(name, ("", {}))
    if source in str(sections["source"].get("address")):
        sections |= {key: sections[key] | said for key, said in mended.items()}
    for key, sizes in SIZES.items():
        sections[key] = sections[key] | {size: _whole(sections[key][size]) for size in sizes if size in sections[key]}
    engine = str(sections["job"].get("engine")).lower()
    if engine in ENGINE_NAMES:
        sections["job"] = {**sections["job"], "engine": ENGINE_NAMES[engine]}
    return {**row, **sections, "id": name, "group": row.get("group") or name, "damaged": damaged}


def _whole(value: Any) -> Any:
    """``"8"`` and ``8.0`` as 8."""
    try:
        number = float(value) if isinstance(value, str | float) else value
    except ValueError:
        return value
    return int(number) if isinstance(number, float) and number.is_integer() else value


def number_of(value: Any) -> float | None:
    """A measured number; None if the value is not a number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < math.inf else None


def with_sizes(row: Row) -> Row:
    """Checks every size. Raises ``NotPredictedError`` for the first invalid size, or for a missing one."""
    named = [(part, size, row[part].get(size)) for part, sizes in SIZES.items() for size in sizes]
    experts = row["model"].get("moe")
    if experts:
        if not isinstance(experts, dict):
            raise NotPredictedError(f"model.moe={experts!r:.60} is no object")
        missing = [size for size in EXPERTS if experts.get(size) is None]
        if missing:
            raise NotPredictedError(f"not stated: moe.{', moe.'.join(missing)}")
        named += [("model.moe", size, experts[size]) for size in EXPERTS]
    for part, size, value in named:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise NotPredictedError(f"{part}.{size}={value!r} is no size")
    if not row["cluster"].get("num_gpus"):
        raise NotPredictedError("not stated: cluster.num_gpus")
    stage = row["job"].get("zero_stage")
    digits = re.search(r"^\D*([0-3])", str(stage or 0))
    if digits is None:
        raise NotPredictedError(f"job.zero_stage={stage!r} is no stage of ZeRO")
    return {**row, "job": {**row["job"], "zero_stage": int(digits.group(1))}}


def contradiction(row: Row) -> str | None:
    """Sizes of a row that contradict each other. Such a row is predicted but enters no error figure."""
    job, total = row["job"], row["cluster"].get("num_gpus")
    sizes = {size: job.get(size) or 1 for size in SPLIT}  # what is not stated is 1, but for dp, which then follows
    whole = total and job.get("dp") and all(isinstance(size, int) for size in sizes.values())
    if whole and (used := math.prod(sizes.values())) != total:
        return f"{', '.join(f'{name}={size}' for name, size in sizes.items())} make {used} GPUs, not {total}"
    micro, dp, batch = (job.get(size) for size in ("micro_batch_size", "dp", "global_batch_size"))
    if all(isinstance(size, int) for size in (micro, dp, batch)) and micro * dp > batch:
        return f"micro_batch_size={micro} on dp={dp} is more than global_batch_size={batch}"
    return None
