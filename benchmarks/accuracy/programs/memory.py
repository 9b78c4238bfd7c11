"""Memory of a rank of a published run, by the program that ran it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from benchmarks.accuracy.programs import megatron, torch_memory
from benchmarks.accuracy.programs.published import PublishedWorkload
from kit.cost.memory import rank_huggingface
from kit.cost.memory.parts import RankParts
from kit.cost.memory.peak import Moment, fullest, phases_of
from kit.cost.memory.states_and_buffers import rank_states


class RankMemory(NamedTuple):
    """Bytes by component, at the moments that programs print."""

    peak: Moment
    end_of_step: Moment
    first_step_peak: Moment
    """Before the optimizer has allocated its moments."""


def memory_of(workload: PublishedWorkload, stage: int) -> RankMemory:
    """Of a rank of one pipeline stage, by moment and component, CUDA's and NCCL's own memory apart."""
    if workload.implementation == "huggingface":
        return moments_of(_huggingface(workload, stage))
    if workload.implementation in ("transformer_engine", "megatron-local"):
        return moments_of(megatron.rank_parts(workload, stage), megatron.moment_bytes(workload, stage))
    return moments_of(torch_memory.rank_parts(workload, stage))


def moments_of(parts: RankParts, late: float = 0.0) -> RankMemory:
    """``late``: bytes of the optimizer that do not exist before the first step."""
    phases = phases_of(parts)
    between = phases["save"] | {"buffers": parts.buffers}
    before_step = fullest(phases["forward"], phases["backward"])
    before_step = before_step | {"optimizer": parts.states.optimizer - late}
    return RankMemory(fullest(*phases.values()), between, fullest(before_step, between))


def _huggingface(workload: PublishedWorkload, stage: int) -> RankParts:
    if workload.engine is None:
        raise ValueError("no engine is known that held this model; use DeepSpeed's")
    states = rank_states(workload.engine, workload.parameters[stage], stage)
    parts = rank_huggingface.rank_parts(workload, workload.engine, states, stage)
    if workload.holds_logits:
        return replace(parts, loss=parts.loss + 4.0 * workload.model.vocab_size * workload.tokens)
    return parts
