"""Rows of unequal length are filled up with what does not count."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kit.engines.megatron.microbatches import length_unit, pad_to_longest
from kit.engines.protocol import IGNORE_INDEX, MicroBatch


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
