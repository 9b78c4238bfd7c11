"""Memory of a rank of a published run, by the program that ran it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.programs import megatron_states, torch_memory
from benchmarks.accuracy.programs.setup import PublishedSetup
from kit.cost.memory import rank_huggingface, rank_megatron
from kit.cost.memory.phases import RankMemory, RankParts, rank_memory
from kit.cost.memory.rank_states import EngineMemory, rank_states
from kit.cost.memory.states import StateBytes

_NONE = StateBytes(weights=0.0, gradients=0.0, gradients_in_forward=0.0, optimizer=0.0)
_NOTHING = EngineMemory(dense=_NONE, experts=_NONE)


def memory_of(setup: PublishedSetup, stage: int) -> RankMemory:
    """Memory of a rank of one pipeline stage, by moment and component, without CUDA's and NCCL's own memory."""
    return rank_memory(_rank_parts(setup, stage))


def _rank_parts(setup: PublishedSetup, stage: int) -> RankParts:
    if setup.kernels == "huggingface":
        if setup.engine is None:
            raise ValueError("no engine is known that held this model; use DeepSpeed's")
        states = rank_states(setup.engine, setup.parameters[stage], stage)
        return rank_huggingface.rank_parts(setup, setup.engine, states, stage)
    if setup.kernels not in ("transformer_engine", "megatron-local"):
        return torch_memory.rank_parts(setup, stage)
    parts = rank_megatron.rank_parts(setup, _NOTHING, megatron_states.rank_states(setup, stage), stage)
    gathered = megatron_states.gathered_bytes(setup, stage)
    return replace(parts, gathered_in_loss=gathered, gathered=gathered, gathered_at_end=gathered)
