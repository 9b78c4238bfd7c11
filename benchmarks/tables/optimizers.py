"""The first table of docs/optimizers.md: which engine runs which optimizer, by what, and its bytes."""

from __future__ import annotations

from kit.specs.layout import ENGINES, EngineName
from kit.specs.optimizers import OPTIMIZERS, OptimizerTraits
from tests.support.page import table


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
