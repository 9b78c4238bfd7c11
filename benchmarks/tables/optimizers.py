"""Tables of docs/optimizers.md: which engine runs which optimizer, by what, its bytes, and how exactly."""

from __future__ import annotations

import json

from benchmarks.page import ROOT, table
from kit.specs.layout import ENGINES, EngineName
from kit.specs.optimizers import OPTIMIZERS, OptimizerTraits

RESULTS = ROOT / "benchmarks" / "results" / "optimizers.json"
"""Rows of ``python -m benchmarks.system_tests.optimizers --write``."""


def text() -> str:
    """A row for each optimizer."""
    rows = [
        [f"`{name}`", _bytes(traits), *(_engine(traits, engine) for engine in ENGINES)]
        for name, traits in OPTIMIZERS.items()
    ]
    return table(("`optimizer.name`", "bytes of moments per parameter", *ENGINES), rows)


def _bytes(traits: OptimizerTraits) -> str:
    matrices, rest, vectors = traits.moments
    parts = [f"{matrices:.3g}"]
    parts += [f"embeddings and head {rest:.3g}"] if rest != matrices else []
    parts += [f"vectors {vectors:.3g}"] if vectors is not None else []
    return "; ".join(parts) if matrices else "sums of rows and columns"


def _engine(traits: OptimizerTraits, engine: EngineName) -> str:
    if engine not in traits.implementations:
        return f"refused: {traits.missing[engine]}"
    needs = traits.needs.get(engine)
    return traits.implementations[engine] + (f"; needs {needs}" if needs else "")


def over_layouts() -> str:
    """A row for each case of ``RESULTS``, by optimizer."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    order = list(OPTIMIZERS)
    rows = [
        [
            f"`{row['optimizer']}`",
            row["engine"],
            row["layout"],
            f"{row['weights']:.1e}",
            "to the bit" if row["native"] else "differs",
            f"{row['exchange']:.1e}" if row["exchange"] else "to the bit",
        ]
        for row in sorted(found, key=lambda row: order.index(row["optimizer"]))
    ]
    heads = ("`optimizer.name`", "engine", "layout", "weights beside plain", "native resume", "exchange resume")
    return table(heads, rows)
