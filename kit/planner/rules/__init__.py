"""Rules that a workload must satisfy to run on its engine: one small function for each refusal.

GPU memory is not a rule (``search`` compares it), and neither is speed: tensor parallelism across nodes is slow but
legal. The rules were read in torch 2.13, deepspeed 0.19.8 and megatron-core 0.16.1; docstrings name the source.

Its rooms, in the order in which data walks:

    rule                          what a rule is
    common                        of several engines
    torch, deepspeed, megatron, megatron_layers
                                  of one engine
    context_parallel, compression, fast_path
                                  of one feature
    job                           of what is trained
"""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.planner.rules import (
    common,
    compression,
    context_parallel,
    deepspeed,
    fast_path,
    job,
    megatron,
    megatron_layers,
    torch,
)
from kit.planner.rules.rule import REGISTERED, Violation

FILES = (
    common,
    compression,
    context_parallel,
    deepspeed,
    fast_path,
    job,
    megatron,
    megatron_layers,
    torch,
)
"""The files that register rules."""
_CHECKS = {engine: tuple(rule.check for rule in rules.values()) for engine, rules in REGISTERED.items()}


def violations(workload: Workload) -> tuple[Violation, ...]:
    """Lists every rule that a workload breaks on the engine of its layout."""
    judged = ((name, rule, rule.check(workload)) for name, rule in REGISTERED[workload.layout.engine].items())
    return tuple(
        Violation(name, rule.message(workload) if callable(rule.message) else rule.message or str(broken))
        for name, rule, broken in judged
        if broken
    )


def is_legal(workload: Workload) -> bool:
    """Whether a workload breaks no rule; stops at the first."""
    for check in _CHECKS[workload.layout.engine]:  # noqa: SIM110 - all() calls a generator for every rule
        if check(workload):
            return False
    return True


__all__ = ["FILES", "Violation", "is_legal", "violations"]
