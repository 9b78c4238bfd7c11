"""Compares measured bytes with the cost model's terms, one row per configuration and term."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.accuracy.deepspeed_bytes.cases import Case
from benchmarks.accuracy.deepspeed_bytes.measure import Held
from kit.cost.memory import offload
from kit.cost.memory.states import state_bytes
from kit.cost.memory.states_and_buffers import engine_memory
from kit.cost.model.params import count
from tests.support.page import header, table

TOLERANCE = 0.02
"""Largest relative difference of a term."""
NOTHING = 0.01
"""Bytes per parameter that are ignored: norms, which are not sharded, and padding to equal shards."""


@dataclass(frozen=True)
class Term:
    """Bytes per parameter of the model on one rank."""

    case: str
    name: str
    """Name of the term: kind, place and moment."""
    predicted: float
    measured: float

    @property
    def agrees(self) -> bool:
        """Whether the term is within ``TOLERANCE``, or too small to count."""
        return abs(self.measured - self.predicted) <= max(TOLERANCE * self.predicted, NOTHING)


def terms(case: Case, measured: dict[str, Held]) -> list[Term]:
    """Every term of a configuration, also those that should be zero."""
    plan = case.plan
    layout, precision, parameters = plan.layout, plan.job.precision, count(plan.model).total
    device = state_bytes(layout, precision)
    host, nvme = offload.host_state_bytes(layout, precision), offload.nvme_state_bytes(layout, precision)
    predicted = {
        ("weights.device", "step"): device.weights,
        ("optimizer.device", "step"): device.optimizer,
        ("gradients.device", "backward"): device.gradients_in_step,
        ("gradients.device", "step"): device.gradients_between_steps,
        ("buffers.device", "step"): engine_memory(plan.workload).buffers / parameters,
        ("weights.host", "step"): host.weights,
        ("optimizer.host", "step"): host.optimizer,
        ("gradients.host", "backward"): host.gradients,
        ("gradients.host", "step"): host.gradients,
        ("buffers.host", "step"): offload.host_buffer_bytes(plan.workload) / parameters,
        ("files.nvme", "step"): nvme.total,
        ("other", "backward"): 0.0,
        ("other", "step"): 0.0,
    }
    moments = {"backward": "before the step", "step": "after it"}
    return [
        Term(case.name, f"{key}, {moments[moment]}", value, measured[moment].get(key, 0) / parameters)
        for (key, moment), value in predicted.items()
    ]


def page(found: list[Term]) -> str:
    """The table of docs/deepspeed-bytes.md, without terms that are zero on both sides."""
    cases = dict.fromkeys(term.case for term in found)
    wrong = sum(not term.agrees for term in found)
    lines = [
        header("What DeepSpeed holds", "make prove NAME=deepspeed-bytes"),
        "The table gives bytes per model parameter on one of two ranks: after the second backward (before the",
        "step), and after the second step. `kit/cost` predicts them. The measurement adds up the storages of all",
        "tensors in the process, by role. On CPU processes a tensor counts as device or host memory by the place",
        "where DeepSpeed stores it with a GPU. `other` is what has no role. Tensors that exist only inside a",
        "backward or a step are not measured.",
        "",
        f"{len(cases)} configurations, {len(found)} terms, {wrong} of them off by more than {TOLERANCE:.0%} "
        f"(and by more than {NOTHING} bytes).",
        "",
    ]
    rows = [
        (term.case, term.name, f"{term.predicted:.3f}", f"{term.measured:.3f}", "" if term.agrees else "**differs**")
        for term in found
        if term.predicted or term.measured >= NOTHING
    ]
    return "\n".join([*lines, table(("configuration", "term", "predicted", "measured", ""), rows, right=True)]) + "\n"
