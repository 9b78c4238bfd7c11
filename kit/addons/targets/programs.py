"""Versions of the programs that ``kit emit --target`` writes files for. ``scripts/program_fields.py`` records the names
of their settings in ``kit/addons/targets/program_fields.json``, and a test compares every file with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kit.emit.derived_file import DerivedFile
from kit.emit.launch import processes_per_node
from kit.planner.plan import Plan

PROGRAMS: Mapping[str, tuple[str, str]] = {
    "accelerate-parallelism": ("accelerate", "1.15.0"),
    "axolotl": ("axolotl", "0.19.0"),
    "llamafactory": ("LLaMA-Factory", "0.9.5"),
    "ms-swift": ("ms-swift", "4.6.0"),
    # Its release 0.3.0 has local_batch_size, global_batch_size and seq_len, which 73aed7f6c renamed on 2026-08-20.
    "torchtitan": ("torchtitan", "56bbb5202 (2026-08-21), newer than its release 0.3.0"),
    "verl": ("verl", "0.9.1"),
    "openrlhf": ("OpenRLHF", "0.11.2"),
}
"""Target → (program, version)."""


def version_line(target: str) -> str:
    """A comment for the file: the version whose settings it names."""
    program, version = PROGRAMS[target]
    return f"# For {program} {version}: another version may call its settings otherwise."


def torchrun(plan: Plan, module: str) -> str:
    """The launch of a module on every node; RDZV is HOST:PORT of the first one."""
    ranks = f"--nnodes {plan.cluster.num_nodes} --nproc-per-node {processes_per_node(plan)} --rdzv-backend c10d"
    return f'torchrun {ranks} --rdzv-endpoint "${{RDZV:-localhost:0}}" -m {module}'


def file_for(
    target: str, name: str, text: Callable[[Plan], str], refuses: Callable[[Plan], Mapping[str, object]]
) -> DerivedFile:
    """A target's file for the plans that nothing refuses. ``refuses``: reason → whether it holds for a plan."""

    def reasons(plan: Plan) -> list[str]:
        return [reason for reason, holds in refuses(plan).items() if holds]

    return DerivedFile(
        name, text, lambda plan: not reasons(plan), target=target, refuses=lambda plan: "; ".join(reasons(plan))
    )
