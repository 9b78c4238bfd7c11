"""The view of a plan: its own values, and the same figures in every text, page and picture that is drawn of it."""

from __future__ import annotations

import operator
import re
from html import unescape
from typing import Any

import pytest

from kit.addons.ui import charts
from kit.addons.ui.answer import answer
from kit.planner.plan import Decision
from kit.report.bottlenecks import bottlenecks
from kit.report.html import page
from kit.report.memory_report import report_of
from kit.report.memory_text import picture
from kit.report.plan_text import render
from kit.report.summary import summary
from kit.report.view import PlanView, by_component, cells, method, view_of
from kit.report.what_if import explain
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import describe
from kit.specs.recipe import Recipe, recipe_of_document
from kit.specs.strict_yaml import Document
from kit.units import human_seconds
from tests.planning.shapes import by_hand
from tests.planning.test_printed import BESIDE, DECISIONS, plan, stage

ALIKE = Decision(rule="next", chosen="", why="", rejected=("torch, dp=16, FSDP2, micro batch 1 x 32: +3.0%, 1 GiB",))
GIVEN = plan(decisions=(*DECISIONS, ALIKE), alternatives=BESIDE)
STEP_S = {"compute": 6.0, "tensor parallel": 2.0, "data parallel": 1.5, "pipeline bubble": 0.495, "optimizer": 0.005}
test_value = by_hand([
    ("sizes", lambda: operator.attrgetter("parameters", "nodes", "usable_gib")(view_of(GIVEN)),
     ("8.03B", "2 × p5.48xlarge", 95.0)),
    ("one node", lambda: view_of(plan(cluster={"num_nodes": 1})).nodes, "p5.48xlarge"),
    ("the layout", lambda: view_of(GIVEN).layout,
     "megatron, tp=2, pp=2, dp=4, distributed optimizer, micro batch 1 x 128"),
    ("its words", lambda: view_of(GIVEN).words,
     "Megatron-core TP 2 · PP 2 · DP 4, distributed optimizer · micro-batch 1\u00a0×\u00a0128"),
    ("the step", lambda: view_of(GIVEN).step_s, STEP_S),
    ("what is shown of it", lambda: [*view_of(GIVEN).shown_s], [*STEP_S][:4]),  # not 0.05 %
    ("alternatives and notes", lambda: [view_of(GIVEN).alternatives, view_of(GIVEN).notes],
     [("DeepSpeed TP 2 ZeRO-3 +12.5%",), DECISIONS[2:]]),
    ("bottlenecks", lambda: [each.what for each in bottlenecks(GIVEN)][:4], ["compute", "NVLink", "fabric", "bubble"]),
    ("their shares", lambda: [round(each.share, 4) for each in bottlenecks(GIVEN) if each.what in (
        "compute", "fabric", "memory")], [0.6, 0.15, round(43 / 95, 4)]),
    ("methods", lambda: [method(JobSpec(objective=each)) for each in ("pretrain", "seq2seq", "reward", "dpo")] + [
        method(JobSpec(objective="sft", lora=LoraSpec(rank=8, **{each: True})))
        for each in ("four_bit", "eight_bit", "use_rslora")],
     ["pretraining", "sequence to sequence", "reward model", "DPO", "SFT, QLoRA nf4 r8", "SFT, LoRA int8 r8",
      "SFT, LoRA r8"]),
    ("what is drawn", lambda: [view_of(GIVEN).drawn, view_of(plan(layout={"pp": 1})).drawn], [(2, 1, 16), None]),
])  # fmt: skip


@pytest.mark.parametrize(
    ("component", "layout", "nodes", "link"),
    [
        ("tensor_parallel", {"tp": 8, "cp": 2}, 2, "NVLink"),
        ("tensor_parallel", {"tp": 16}, 2, "fabric"),
        ("context_parallel", {"tp": 2, "cp": 4, "dp": 16}, 2, "NVLink"),
        ("context_parallel", {"tp": 4, "cp": 4, "dp": 1}, 2, "fabric"),
        ("expert_parallel", {"ep": 4, "etp": 2, "tp": 4, "cp": 4}, 2, "NVLink"),
        ("expert_parallel", {"ep": 4, "etp": 4, "tp": 2}, 2, "fabric"),
        ("data_parallel", {}, 1, "NVLink"),
        ("pipeline_transfer", {}, 1, "NVLink"),
        ("pipeline_transfer", {}, 2, "fabric"),
        ("recompute", {}, 2, "compute"),
        ("offload", {}, 2, "host memory and PCIe"),
        ("scoring", {}, 2, "compute"),
    ],
)
def test_a_component_is_of_the_link_that_carries_it(
    component: str, layout: dict[str, Any], nodes: int, link: str
) -> None:
    """Eight GPUs of a node are on NVLink; groups of tensor-parallel ranks are innermost, then context-parallel ones."""
    times = {"step_time_components_s": {"launch": 0.0, component: 2.5}}
    first, *rest = bottlenecks(plan(layout, times, {"num_nodes": nodes, "host_ram_gib": None}))
    assert (first.what, first.share, [each.what for each in rest]) == (link, 0.25, ["memory"])


def test_components_are_of_the_stages_in_which_they_count() -> None:
    stages = (stage(0, 10.0, 5.0, 0.05, 4.0, 0.04, 0.0, 2.0), stage(1, 9.0, 5.0, 0.0, 2.0, 0.049, 0.0, 2.0))
    assert by_component(stages) == {
        "weights": [10.0, 9.0], "gradients": [5.0, 5.0], "optimizer": [0.05, 0.0], "activations": [4.0, 2.0],
        "overhead": [2.0, 2.0],
    }  # fmt: skip
    assert cells(stages[0], ["weights", "overhead"]).split() == ["10.0", "2.0", "21.1"]
    drawn = charts.memory(view_of(plan(predicted={"memory": (stage(0, 10.0, 5.0, 0.04, 4.0, 0.04, 0.04, 2.0),)})))
    assert "fullest GPU: 21.1 of 95.0 GiB" in drawn["aria"]["label"]["description"], "what is not drawn counts"


@pytest.fixture(scope="module")
def asked() -> tuple[Recipe, PlanView]:
    """A recipe of several stages and nodes, and the view of its plan."""
    recipe = recipe_of_document(Document(name="test", data={}, lines={}), [
        "model=llama-3-70b", "cluster=aws:p5.48xlarge:4", "job.total_tokens=1e11", "layout.engine=megatron",
        "layout.pp=4", "layout.tp=4",
    ])  # fmt: skip
    found = answer(recipe).view
    assert found is not None
    return recipe, found


def test_every_renderer_has_the_same_figures(asked: tuple[Recipe, PlanView]) -> None:
    recipe, seen = asked
    predicted, whole = seen.plan.predicted, seen.plan.cluster.gpu.memory_gib
    texts = {
        "summary": summary(seen, width=1000), "whole": render(seen), "explained": str(explain(seen.plan)),
        "html": re.sub(r"\s+", " ", unescape(re.sub("<[^>]*>", " ", page(seen)))),
        "memory": picture(report_of(seen.plan.workload)).plain,
    }  # fmt: skip
    rows = [cells(each, by_component(predicted.memory)) for each in predicted.memory]
    assert len(rows) == 4
    said: dict[str, tuple[str, ...]] = {
        f"{predicted.peak_gib:.1f} ": ("summary", "whole", "explained", "html", "memory"),
        f"{seen.usable_gib:.1f} ": ("summary", "whole", "explained", "html", "memory"),
        human_seconds(predicted.step_time_s): ("summary", "whole", "explained", "html"),
        f"MFU {predicted.mfu:.1%}": ("summary", "whole", "explained", "html"),
        f"${predicted.total_cost_usd:,.0f}": ("summary", "whole", "explained", "html"),
        describe(seen.plan.layout): ("whole", "explained", "html", "memory"),
        seen.parameters: ("summary", "whole", "explained", "html", "memory"),
        **{f"{name} {human_seconds(seconds)}": ("whole", "html") for name, seconds in seen.shown_s.items()},
        **dict.fromkeys(rows, ("whole", "memory")),
        **{f"Stage {each.stage}: {each.peak_gib:.1f} GiB of {seen.usable_gib:.1f} usable ({whole:.1f} total)": ("html",)
           for each in predicted.memory},
    }  # fmt: skip
    assert [(text, name) for text, names in said.items() for name in names if text not in texts[name]] == []
    ui, own = answer(recipe), by_component(predicted.memory)
    assert numbers(charts.step(ui)) == pytest.approx(sorted(seen.step_s.values(), reverse=True), abs=1e-5)
    assert numbers(charts.memory(seen)) == pytest.approx([gib for sizes in own.values() for gib in sizes], abs=1e-3)


def numbers(chart: dict[str, Any]) -> list[float]:
    """What the bars of a chart show, in their order."""
    return [value for series in chart["series"] for value in series["data"]]
