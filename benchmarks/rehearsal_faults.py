"""Faults planted into a rehearsal's twin, on any engine: proof that a rehearsal can fail, and in which of its figures.

Each takes the twin's engine, built, and makes it wrong. They reach its processes through ``planted/sitecustomize.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(fault: str) -> dict[str, str]:
    """What a rehearsal's environment must have for its twin to be planted."""
    path = [str(ROOT / "benchmarks" / "planted"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "KIT_PLANT": fault, "PYTHONPATH": os.pathsep.join(path)}


def plant(fault: str) -> None:
    """In the process of a rank, before it builds its engine."""
    import kit.engines

    install, build = FAULTS[fault], kit.engines.build_engine

    def planted(rundir: Any) -> Any:
        engine = build(rundir)
        install(engine)
        return engine

    kit.engines.build_engine = planted


def _double_gradients(engine: Any) -> None:
    """Twice the gradient: with Adam, losses hardly notice."""
    from benchmarks.parity.faults import FAULTS as of_engines

    name = type(engine).__name__.removesuffix("Engine").lower()
    if name != "torch":
        of_engines[f"{name}-double-gradients"].install()
        return
    apply = engine.apply

    def doubled(learning_rate: float) -> Any:
        for parameter in engine._parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(2.0)
        return apply(learning_rate)

    engine.apply = doubled


def _lost_optimizer_state(engine: Any) -> None:
    """A resumed run starts with moments of zero, as where a checkpoint forgot them."""
    import torch.distributed as dist

    from kit.engines.base import StateKind

    load = engine.load

    def loaded(directory: Path) -> None:
        load(directory)
        for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
            shapes = {name: tuple(tensor.shape) for name, tensor in engine.export_state(kind) if tensor is not None}
            everyone: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
            dist.all_gather_object(everyone, shapes)
            engine.import_state(kind, _Zeros({name: shape for found in everyone for name, shape in found.items()}))

    engine.load = loaded


def _transposed_query(engine: Any) -> None:
    """An export writes the query projection transposed, as with a wrong rule of a weight map; it stays square."""
    from kit.engines.base import StateKind

    def wrong(export: Callable[[Any], Iterator[tuple[str, Any]]]) -> Callable[[Any], Iterator[tuple[str, Any]]]:
        def transposed(kind: Any) -> Iterator[tuple[str, Any]]:
            for name, tensor in export(kind):
                hit = kind is StateKind.MASTER and tensor is not None and name.endswith("q_proj.weight")
                yield name, tensor.T.contiguous() if hit else tensor

        return transposed

    engine.export_state = wrong(engine.export_state)
    if hasattr(engine, "export_owned"):
        engine.export_owned = wrong(engine.export_owned)


class _Zeros:
    """A source of zeros."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Any:
        import torch

        return torch.zeros(self._shapes[name])

    def read_flat(self, name: str, start: int, length: int) -> Any:
        return self.read(name).flatten()[start : start + length]

    def read_block(self, name: str, dim: int, start: int, length: int) -> Any:
        return self.read(name).narrow(dim, start, length)


FAULTS: dict[str, Callable[[Any], None]] = {
    "double-gradients": _double_gradients,
    "lost-optimizer-state": _lost_optimizer_state,
    "transposed-query": _transposed_query,
}

SHOWS = {
    "double-gradients": "norm_difference",
    "lost-optimizer-state": "norm_difference",
    "transposed-query": "weight_difference",
}
"""The figure of a rehearsal in which each must show."""
