"""Packed rows by document: transformers' masked attention, without masks and without asking the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kit.engines.protocol import IGNORE_INDEX, StateKind
from kit.engines.torch.engine import TorchEngine
from kit.specs.run import DataSpec
from tests.support import tiny
from tests.support.host_syncs import waits_in_a_step
from tests.training import cases
from tests.training.batches import micro_batches

LENGTHS = ((5, 20, 7), (32,), (1, 30, 1), (16, 16))
"""Lengths of the documents of each row. The last one of the first row is padding."""


def packed():
    """Two micro batches of two rows."""
    rows = iter(LENGTHS)
    found = []
    for batch in micro_batches(0, mbs=2, accumulation=2):
        own = [next(rows), next(rows)]
        positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in own])
        ids = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in own])
        labels = batch.labels.clone()
        if own[0] == LENGTHS[0]:
            ids[0, 25:], labels[0, 25:] = -1, IGNORE_INDEX
        found.append(dataclasses.replace(batch, position_ids=positions, sequence_ids=ids, labels=labels))
    return found


def gradients(tmp_path, spec, packing: bool, **layout):
    data = DataSpec(train="data", packing=packing)
    plan = tiny.plan(spec, job={"objective": "sft"}, gradient_accumulation_steps=2, **layout)
    engine = TorchEngine(tiny.run_directory(tmp_path / f"{packing}{len(layout)}", plan, data=data))
    losses = engine.evaluate(packed()).mean, engine.forward_backward(packed()).mean
    found = cases.state(engine, StateKind.GRADIENT)
    engine.discard()
    waits, hidden = waits_in_a_step(engine, packed())
    return losses, found, waits, hidden


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("family", "recompute"), [("llama", "none"), ("llama", "full"), ("qwen3", "none")])
def test_by_document_is_by_mask(tmp_path, family, recompute):
    """``packing`` false with the same rows is transformers' own way: masks from where positions start again."""
    spec = tiny.model(family)
    masked, expected, asking, _ = gradients(tmp_path, spec, packing=False, recompute=recompute)
    found, by_document, waits, hidden = gradients(tmp_path, spec, packing=True, recompute=recompute)
    assert found == pytest.approx(masked, rel=1e-6)
    torch.testing.assert_close(by_document, expected, rtol=1e-4, atol=1e-7)
    # A row each, of the data's own tensors, which are the host's. Python 3.12 names the function around the list.
    rows = [name for name in waits if name.startswith("packed_attention.py:")]
    assert [waits.pop(name) for name in rows] == [4]
    assert waits == {"loss.py:to_host": 1}
    assert not hidden
    assert asking["masking_utils.py:find_packed_sequence_indices"] == 2  # once a micro batch


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("family", "sizes"), [("mistral", {"sliding_window": 8}), ("gpt2", {})])
def test_windows_go_on_by_masks(tmp_path, family, sizes):
    """And families whose packed attention was not tried."""
    spec = tiny.model(family, **sizes)
    masked, expected, *_ = gradients(tmp_path, spec, packing=False)
    found, same, *_ = gradients(tmp_path, spec, packing=True)
    assert found == masked
    assert all(torch.equal(same[name], gradient) for name, gradient in expected.items())
