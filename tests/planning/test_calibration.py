"""What earlier runs teach (kit/planner/calibration): which kind is nearest, means of runs, corrected predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.cost.memory.peak import peak_gib
from kit.planner import calibration, search
from kit.planner.calibration import Calibration, Residual
from kit.specs.layout import Layout
from tests.planning.questions import PLAN, Z2, M, request
from tests.planning.shapes import DENSE, EXPERTS, Rows, by_hand, flat, work
from tests.support.files import file_with
from tests.support.models import deepspeed, megatron, torch

PLACE = "dgx-h100 H100"
RAN = {
    "torch huggingface, bf16, dense": 1.1,
    "megatron local, fp8, dense": 1.2,
    "megatron local, bf16, experts": 1.3,
    "deepspeed local, fp32, experts": 1.4,
}


def nearest(layout: Layout, model: Any = DENSE, **more: Any) -> float:
    """Ratio that a kind without runs takes."""
    rows = {f"{PLACE}, {name}": Residual(ratio, 5.0, 2) for name, ratio in RAN.items()} | {
        "other H100, megatron local, bf16, dense": Residual(9.0, 0, 1)
    }
    found = Calibration(rows).of(work(layout, model, **more))
    assert found.extra_gib == (0 if found.carried_from else 5)
    return found.step_time_factor


def learned(tmp: Path, known: Calibration, **measured: Any) -> Residual:
    """What one more run teaches."""
    path = file_with(tmp / "summary.json", json.dumps(measured))
    return calibration.learn(PLAN, path, known).residuals[calibration.kind(PLAN.workload)]


CALIBRATION: Rows = [
    ("the most similar kind", lambda: [nearest(each, model, **more) for each, model, more in (
        (torch(), DENSE, {}), (Z2, DENSE, {}), (M, DENSE, {}), (M, EXPERTS, {"precision": "fp32"}),
        (megatron(implementation="transformer_engine"), DENSE, {}),
        (deepspeed(tp=2).but(implementation="local"), DENSE, {"precision": "fp32"}))], [1.1, 1.1, 1.3, 1.4, 1.1, 1.4]),
    ("nothing known here", lambda: [Calibration({}).of(work(M)),
        Calibration({"other H100, megatron local, bf16, dense": Residual(9.0, 0, 1)}).of(work(M))],
     [Residual(), Residual()]),
    ("kinds", lambda: [calibration.kind(work(each, model, **more)) for each, model, more in ((M, DENSE, {}), (Z2,
        EXPERTS, {"precision": "fp32"}))],
     [f"{PLACE}, megatron local, bf16, dense", f"{PLACE}, deepspeed huggingface, fp32, experts"]),
    ("likeness", lambda: calibration._likeness(["megatron local", "bf16", "dense"], ["deepspeed local", "bf16",
        "experts"]), (True, True, False, False)),
    ("corrected by earlier runs", lambda: [getattr(search.LayoutScorer(replace(request(), calibration=known)),
        name)(request().workload(M))
        / getattr(search.LayoutScorer(request()),
        name)(request().workload(M)) for known in (Calibration({f"{PLACE}, megatron local, bf16, dense": Residual(
            1.5, 0.0, 1)}),) for name in ("step_time_s", "least_s", "peak_gib")], [1.5, 1.5, 1.0]),
    ("memory of earlier runs", lambda: search.LayoutScorer(replace(request(),
        calibration=Calibration({f"{PLACE}, megatron local, bf16, dense": Residual(
        1.5, 2.0, 1)}))).peak_gib(request().workload(M)) - peak_gib(request().workload(M)), 2.0),
    ("corrected predictions", lambda: [getattr(found := calibration.corrected(PLAN.predicted, Residual(2.0, 3.0, 2)),
        name) / getattr(PLAN.predicted, name)
                                       for name in ("step_time_s", "tokens_per_s", "mfu",
                                       "days")] + [found.peak_gib - PLAN.predicted.peak_gib],
     [2, 0.5, 0.5, 2, 3]),
    ("words of a correction", lambda: [calibration.corrected(PLAN.predicted, each).step_time_evidence for each in (
        Residual(2.0, 3.0, 2), Residual(1.5, 0.0, 1,
        "torch huggingface, bf16, dense"))] + [calibration.corrected(PLAN.predicted, Residual()) is PLAN.predicted],
     ["calibrated by 2 runs on this cluster: step x 2.00, +3.0 GiB",
         "calibrated by 1 run of torch huggingface, bf16, dense on this cluster: step x 1.50, "
      "memory as predicted", True]),
]  # fmt: skip


test_value = by_hand(CALIBRATION)


STEP_S, PEAK_GIB = PLAN.predicted.step_time_s, PLAN.predicted.peak_gib
ONE_RUN = Calibration({calibration.kind(PLAN.workload): Residual(2.0, 3.0, 1), "other": Residual(5.0, 5.0, 5)})


@pytest.mark.parametrize(
    ("known", "measured", "taught"),
    [
        (calibration.NONE, {"step_time_s": 2 * STEP_S, "memory_gib": PEAK_GIB + 3}, [2.0, 3.0, 1, ""]),
        (ONE_RUN, {"step_time_s": STEP_S, "memory_is": "peak allocated"}, [1.5, 3.0, 2, ""]),
        (ONE_RUN, {"step_time_s": STEP_S, "memory_gib": 1.0, "memory_is": "of the process"}, [1.5, 3.0, 2, ""]),
        (ONE_RUN, {"memory_gib": PEAK_GIB + 1, "memory_is": "peak allocated"}, [2.0, 2.0, 2, ""]),
    ],
    ids=["first", "step", "of a CPU", "memory"],
)
def test_runs_of_a_kind_are_averaged(
    known: Calibration, measured: dict[str, Any], taught: list[Any], tmp_path: Path
) -> None:
    found = learned(tmp_path, known, **{f"measured_{name}": value for name, value in measured.items()})
    assert flat(found) == pytest.approx(taught)
    calibration.save(known, tmp_path / "kept.yaml")
    assert (calibration.load(tmp_path / "kept.yaml"), calibration.load(None)) == (known, calibration.NONE)
