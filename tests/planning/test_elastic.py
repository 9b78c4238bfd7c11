"""A plan on fewer nodes (kit/planner/elastic): what stays, and why there is none."""

from __future__ import annotations

from dataclasses import replace

from kit.cost.memory.peak import peak_gib
from kit.planner import elastic
from tests.planning.questions import PLAN
from tests.planning.shapes import Rows, by_hand

FEWER_NODES: Rows = [
    ("a plan on fewer nodes", lambda: [elastic.legal_nodes(PLAN), (smaller := elastic.on_nodes(PLAN, 3)).layout.dp,
        smaller.layout.gradient_accumulation_steps,
                                       smaller.cluster.num_nodes,
                                       smaller.predicted.step_time_s > PLAN.predicted.step_time_s,
                                       elastic.on_nodes(PLAN, 4) is PLAN],
     [(1, 2, 3, 4), 24, 4, 3, True, True]),
    ("no plan on fewer nodes", lambda: [elastic._workload(each, nodes) for each, nodes in (
        (PLAN, 0), (PLAN, 5), (replace(PLAN, layout=PLAN.layout.but(gradient_accumulation_steps=1)), 3), (replace(
            PLAN, layout=PLAN.layout.but(tp=16, dp=2)), 1), (replace(PLAN,
            layout=PLAN.layout.but(gradient_accumulation_steps=6)), 2))],
     ["must be from 1 to 4", "must be from 1 to 4", "global_batch_size=32 is no multiple of micro_batch_size=1 · dp=24",
      "8 GPUs are no multiple of the 16 that share one replica",
      "micro_batch_size·gradient_accumulation_steps·dp=192 is not global_batch_size=96; use "
      "gradient_accumulation_steps=6"]),
    # A twentieth of the memory is not usable: 1.02 times the need is too little, 1.06 times is enough.
    ("no memory on fewer nodes", lambda: [isinstance(elastic._workload(replace(PLAN, cluster=replace(PLAN.cluster,
        gpu=replace(
        PLAN.cluster.gpu, memory_gib=each * peak_gib(PLAN.workload.with_layout(PLAN.layout.but(
            dp=16, gradient_accumulation_steps=6)))))), 2), str) for each in (1.02, 1.06)], [True, False]),
]  # fmt: skip


test_value = by_hand(FEWER_NODES)
