"""Rows of unequal length are filled up with what does not count."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from kit.engines.megatron.microbatches import length_unit, pad_to_longest
from kit.engines.megatron.model.rope import inverse_frequencies
from kit.engines.protocol import IGNORE_INDEX, MicroBatch
from tests.megatron.shapes import TWO_ROTATIONS
from tests.support import tiny
from tests.support.workers import pool


def config(**sizes):
    defaults = {"context_parallel_size": 1, "tensor_model_parallel_size": 1, "sequence_parallel": False}
    return SimpleNamespace(**(defaults | sizes))


def test_length_unit_is_what_chunks_and_sequence_parallelism_divide():
    units = {(1, 1, False): 1, (4, 1, False): 1, (4, 1, True): 4, (1, 2, False): 4, (3, 2, True): 12, (4, 2, True): 8}
    for (tp, cp, sp), unit in units.items():
        chosen = config(tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=sp)
        assert length_unit(chosen) == unit, (tp, cp, sp)


def test_rows_get_one_length_and_keep_what_they_had():
    whole = MicroBatch(torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long))
    short = MicroBatch(*(torch.ones(2, 5, dtype=torch.long) for _ in range(4)))
    long, filled = pad_to_longest([whole, short], 4)
    assert long.input_ids.shape == filled.input_ids.shape == (2, 8)
    assert long.position_ids is None
    assert torch.equal(filled.labels[:, :5], short.labels)
    assert (filled.labels[:, 5:] == IGNORE_INDEX).all()
    assert (filled.sequence_ids[:, 5:] == -1).all()
    assert pad_to_longest([whole], 3)[0] is whole


def angles_at(positions):
    """Of layers without and with a window."""
    from kit.engines.megatron.model.rope import DualRotaryEmbedding

    rotation = DualRotaryEmbedding(tiny.model("gemma3_text", **TWO_ROTATIONS), dist.new_subgroups(group_size=1)[0])
    rotation.positions = positions
    return rotation(positions.shape[1])[:, :, 0, 0]


def test_both_rotations_restart_in_every_document():
    positions, spec = torch.tensor([[0, 1, 2, 0, 1, 0]]), tiny.model("gemma3_text", **TWO_ROTATIONS)
    both = torch.stack([inverse_frequencies(spec, local) for local in (False, True)])[:, None].repeat(1, 1, 2)
    assert all(
        torch.equal(found, positions[..., None] * both) for found in pool("megatron", 2).run(angles_at, positions)
    )
