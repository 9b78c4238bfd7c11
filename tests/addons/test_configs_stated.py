"""What ``kit plan FILE`` says of files that state what they need, beside what they state (``stated_configs.yaml``). The
numbers are rounded, and say neither how long unpacked rows are nor how memory was read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from kit.addons.configs.answer import Answer
from kit.addons.configs.entries import Entry, Source
from kit.addons.configs.linked import opener
from kit.addons.configs.reading import Asked
from kit.addons.configs.tables import table_of
from kit.addons.configs.variants import Variant, variant
from kit.cost.time.step import StepTimer

ROWS = yaml.safe_load(Path(__file__).with_name("stated_configs.yaml").read_text(encoding="utf-8"))
SMALLER = {"H100": 80, "L40S": 48, "A100-40": 40, "RTX-4090": 24}
"""GPU → its memory, GB."""
ROUNDED = 1.2
"""A peak of allocated memory, and what a person reads off and rounds."""


def asked(row: Mapping[str, Any], gpu: str) -> Asked:
    keys = row["keys"]
    table = table_of(set(keys), row.get("program", ""), row.get("command", ""))
    assert table is not None, row["file"]
    entries = {key: Entry(value, 1) for key, value in keys.items()}
    return Asked(
        table, Source(row["file"], "", "yaml", entries, row.get("command", "")), opener(Path()), f"{row['gpus']}x{gpu}"
    )


@cache
def predicted(number: int) -> Variant:
    return variant(asked(ROWS[number], "H100"), {}, StepTimer())


PACKED = [number for number in range(len(ROWS)) if predicted(number).described.packed]


def ratio(number: int) -> float:
    return predicted(number).peak_gib / float(ROWS[number]["gib"])


def test_packed_rows_are_near_what_is_stated() -> None:
    errors = [abs(ratio(number) - 1) for number in PACKED]
    near = sum(error <= 0.15 for error in errors)
    print(f"median error {median(errors):.1%} of {len(errors)} files, {near / len(errors):.0%} within 15 %")
    assert len(errors) == 26
    assert median(errors) <= 0.12
    assert near >= 19


@pytest.mark.parametrize("number", PACKED, ids=lambda number: ROWS[number]["file"])
def test_a_bound_is_on_its_side(number: int) -> None:
    bounds = {gap.bound for gap in predicted(number).described.gaps}
    if bounds == {"least"}:
        assert ratio(number) <= ROUNDED
    if bounds == {"most"}:
        assert ratio(number) >= 1 / ROUNDED


SMALL = [
    (number, gpu)
    for number, row in enumerate(ROWS)
    for gpu, gb in SMALLER.items()
    if gb * ROUNDED < row["gib"] and row["gpus"] <= 4
]


@pytest.mark.parametrize(("number", "gpu"), SMALL)
def test_nothing_fits_where_less_is_there_than_is_stated(number: int, gpu: str) -> None:
    wanted = asked(ROWS[number], gpu)
    assert Answer(Path("x"), wanted, variant(wanted, {}, StepTimer()), None, (), None, None).verdict != "fits"  # type: ignore[arg-type]
