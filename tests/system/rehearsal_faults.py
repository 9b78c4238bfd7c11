"""Faults planted into a rehearsal's scaled-down copy, on any engine: proof that a rehearsal can fail, and in
which of its figures.

Each takes an engine, built, and makes it wrong, in the exact run, in the run in bf16, or in both. They reach the
processes through ``planted/sitecustomize.py``. Runs do not see each other: faults of different ones go in together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import kit.engines
from kit.engines.full_tensors import full_tensors
from kit.engines.protocol import StateKind
from tests.support import ROOT
from tests.support.checkpoints import InMemory
from tests.system.parity import faults as parity

EXACT, IN_BF16 = "scaled-down", "scaled-down-bf16"
"""Run directories of a rehearsal."""


@dataclass(frozen=True)
class Fault:
    """One mistake."""

    install: Callable[[Any], None]
    shows: Mapping[str, str]
    """Run directory in which it is planted → the rehearsal's figure in which it must show."""


def environment(faults: Sequence[str]) -> dict[str, str]:
    """What a launcher's environment must have for its ranks to be planted: with faults of rehearsals the scaled-down
    copy's, with one of parity (``parity/faults.py``) every rank."""
    path = [str(ROOT / "tests" / "system" / "planted"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "KIT_PLANT": ",".join(faults), "PYTHONPATH": os.pathsep.join(path)}


def plant(faults: str, run_directory: str) -> None:
    """In the process of a rank, before it builds its engine: those of the faults that belong to this run."""
    build, names = kit.engines.build_engine, faults.split(",")

    def planted(rundir: Any) -> Any:
        for name in parity.FAULTS.keys() & names:
            parity.FAULTS[name].install()
        engine = build(rundir)
        for name in (each for each in names if each in FAULTS and run_directory in FAULTS[each].shows):
            FAULTS[name].install(engine)
        return engine

    kit.engines.build_engine = planted


def _double_gradients(engine: Any) -> None:
    """Twice the gradient: with Adam, losses hardly notice."""
    name = type(engine).__name__
    if name == "DeepSpeedEngine":
        parity.FAULTS["deepspeed-double-gradients"].install()
    elif name == "MegatronEngine":
        # The engine is built, so its configuration holds the function that the parity fault would replace.
        engine._config.finalize_model_grads_func = parity.twice_the_gradients(engine._config.finalize_model_grads_func)
    else:
        # Before the norm is taken, which comes over with the loss; the losses stay right.
        parity.Fault("kit.engines.hf_engine:mean_scale", lambda scale: lambda *given: 2 * scale(*given)).install()


def _double_learning_rate(engine: Any) -> None:
    """A schedule that counts something twice."""
    apply = engine.apply
    engine.apply = lambda learning_rate: apply(2 * learning_rate)


def _afterwards(method: str, *kinds: StateKind, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """After each call of a method of the engine, ``change`` of every tensor of these kinds is its state."""

    def install(engine: Any) -> None:
        right = getattr(engine, method)

        def wrong(*given: Any) -> Any:
            result = right(*given)
            for kind in kinds:
                engine.import_state(kind, InMemory({k: change(v) for k, v in _gathered(engine, kind).items()}))
            return result

        setattr(engine, method, wrong)

    return install


def _exported(ending: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """``change``: block → block, of the master weights whose name ends so."""

    def install(engine: Any) -> None:
        export = engine.export_blocks
        engine.export_blocks = lambda kinds: (
            change(block) if block.kind is StateKind.MASTER and block.name.endswith(ending) else block
            for block in export(kinds)
        )

    return install


def _gathered(engine: Any, kind: Any) -> dict[str, Any]:
    """All tensors of one kind, on every rank."""
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, full_tensors(engine, kind))
    return {name: tensor for found in everyone for name, tensor in found.items()}


_MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
FAULTS: dict[str, Fault] = {
    "double-gradients": Fault(_double_gradients, {EXACT: "norm_difference", IN_BF16: "in_bf16.norm_difference"}),
    "double-learning-rate": Fault(_double_learning_rate, {IN_BF16: "in_bf16.update_difference"}),
    # Masters in bf16: what is smaller than a bit of a weight is lost at every step.
    "rounded-masters": Fault(
        _afterwards("apply", StateKind.MASTER, change=lambda tensor: tensor.to(torch.bfloat16).float()),
        {IN_BF16: "in_bf16.rounded_masters"},
    ),
    # A resumed run starts with moments of zero, as where a checkpoint forgot them. The count of steps is set last.
    "lost-optimizer-state": Fault(
        _afterwards("set_optimizer_steps", *_MOMENTS, change=torch.zeros_like), {EXACT: "norm_difference"}
    ),
    # An export writes the query projection transposed, as with a wrong rule of a weight map; it stays square.
    "transposed-query": Fault(
        _exported("q_proj.weight", lambda b: replace(b, row=b.column, column=b.row, values=b.values.T)),
        {EXACT: "weight_difference"},
    ),
    # An export adds up the ranks' copies of the head, where it should take one.
    "doubled-head": Fault(
        _exported("lm_head.weight", lambda b: replace(b, values=2 * b.values)), {EXACT: "exported_difference"}
    ),
}
TOGETHER = (
    ("double-gradients",),
    ("lost-optimizer-state", "double-learning-rate"),
    ("transposed-query", "rounded-masters"),
    ("doubled-head",),
)
"""Rehearsals that show all of them: gradients, resume, weights, export; and in bf16 gradients, optimizer, masters."""
