"""Write the tables of docs that the planner makes: ``python -m benchmarks.tables``. Imports no engine."""

from __future__ import annotations

from benchmarks.tables import deepspeed, model_types, one_node_70b, optimizers, pipeline_depths
from tests.support.page import Section

SECTIONS = (
    Section("docs/notes/deepspeed.md", "ZeRO stages", deepspeed.stages),
    Section("docs/notes/deepspeed.md", "slow links", deepspeed.slow_links),
    Section("docs/one-node-70b.md", "ways to hold the states", one_node_70b.text),
    Section("docs/optimizers.md", "optimizers by engine", optimizers.text),
    Section("docs/pipeline-choice.md", "pipeline depths", pipeline_depths.text),
    model_types.SECTION,
)

if __name__ == "__main__":
    for section in SECTIONS:
        section.write()
