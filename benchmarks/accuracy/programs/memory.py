"""Memory of a rank of a published run, by the program that ran it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.programs import megatron, torch_memory
from benchmarks.accuracy.programs.published import PublishedWorkload
from kit.cost.memory import rank_huggingface
from kit.cost.memory.phases import RankMemory, RankParts, rank_memory
from kit.cost.memory.states_and_buffers import rank_states


def memory_of(workload: PublishedWorkload, stage: int) -> RankMemory:
    """Of a rank of one pipeline stage, by moment and component, CUDA's and NCCL's own memory apart."""
    if workload.implementation == "huggingface":
        return rank_memory(_huggingface(workload, stage))
    program = megatron if workload.implementation in ("transformer_engine", "megatron-local") else torch_memory
    return rank_memory(program.rank_parts(workload, stage))


def _huggingface(workload: PublishedWorkload, stage: int) -> RankParts:
    if workload.engine is None:
        raise ValueError("no engine is known that held this model; use DeepSpeed's")
    states = rank_states(workload.engine, workload.parameters[stage], stage)
    parts = rank_huggingface.rank_parts(workload, workload.engine, states, stage)
    if workload.holds_logits:
        return replace(parts, loss=parts.loss + 4.0 * workload.model.vocab_size * workload.tokens)
    return parts
