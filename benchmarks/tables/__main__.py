"""Write the tables of docs that the planner makes: ``python -m benchmarks.tables``. Imports no engine."""

from __future__ import annotations

from benchmarks.page import Section
from benchmarks.tables import deepspeed_stages, one_node_70b, pipeline_depths, slow_links

SECTIONS = (
    Section("docs/deepspeed.md", "ZeRO stages", deepspeed_stages.text),
    Section("docs/deepspeed.md", "slow links", slow_links.text),
    Section("docs/one-node-70b.md", "ways to hold the states", one_node_70b.text),
    Section("docs/pipeline-choice.md", "pipeline depths", pipeline_depths.text),
)

if __name__ == "__main__":
    for section in SECTIONS:
        section.write()
