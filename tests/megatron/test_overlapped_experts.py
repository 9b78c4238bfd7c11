"""Layers that are alive while all-to-alls are overlapped: megatron-core's own schedule, with layers that only count."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan

from kit.cost.memory.peak import parts_of
from kit.cost.memory.rank_megatron import layer_saved
from kit.cost.workload import Workload
from kit.specs.catalog import load_model
from tests.support.models import cluster, job, megatron

LAYERS = 6


class Node:
    """A part of a layer: its tensors are alive from its forward to its backward."""

    def __init__(self, alive):
        self._alive = alive

    def forward(self, tensor=None):
        self._alive.append(self)
        return tensor

    def backward(self, gradient):
        self._alive.remove(self)
        return gradient

    def backward_dw(self):
        pass


def micro_batch(alive, moments):
    """A micro batch of a stage of ``LAYERS`` layers; ``moments``: layers that are alive when a node has run."""

    class Counting(Node):
        def forward(self, tensor=None):
            result = super().forward(tensor)
            moments.append(len(alive))
            return result

    outside = [SimpleNamespace(forward=lambda tensor=None: tensor, backward=lambda gradient: gradient) for _ in "fl"]
    layers = [
        SimpleNamespace(
            **{part: Node([]) for part in ("moe_dispatch", "mlp", "moe_combine", "mtp_post_process")},
            attn=Counting(alive),  # its backward is a layer's last
            config=SimpleNamespace(ep_overlap_early_attn_memory_release=False),
            get_fp8_context=nullcontext,
            release_state=lambda: None,
        )
        for _ in range(LAYERS)
    ]
    return SimpleNamespace(
        pre_process=outside[0],
        post_process=outside[1],
        vp_stage=None,
        num_layers=lambda: len(layers),
        get_layer=layers.__getitem__,
        pop_layer=layers.pop,
        **dict.fromkeys(("record_current_stream", "wait_current_stream", "release_state"), lambda: None),
    )


def test_a_forward_beside_a_backward_has_one_layer_more_alive(monkeypatch):
    """Not one micro batch more: the schedule takes a layer of each in turn. The plan counts that layer in backward."""
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)  # without CUDA they raise
    alive, moments = [], []
    first, second = (micro_batch(alive, moments) for _ in range(2))
    run = TransformerModelChunkSchedulePlan.run
    run(first, None)
    assert max(moments) == len(alive) == LAYERS
    run(second, first, b_grad=torch.ones(()))
    assert max(moments) == LAYERS + 1
    assert len(alive) == LAYERS, "the micro batch before is gone"


@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (2, 2)])
def test_the_plan_counts_that_layer(pp, vp):
    sizes = {"ep": 4, "dp": 4, "pp": pp, "vp": vp, "gradient_accumulation_steps": 8}
    plain, overlapped = (
        Workload(
            load_model("qwen3-30b-a3b"),
            cluster("8xH200"),
            job(seq_length=4096),
            megatron(implementation="transformer_engine", overlap_moe_expert_parallel_comm=on, **sizes),
        )
        for on in (False, True)
    )
    before, after = parts_of(plain, 0), parts_of(overlapped, 0)
    assert after.saved_activations == before.saved_activations
    assert after.recomputed_layer - before.recomputed_layer == layer_saved(overlapped, True) > 0
    alone = overlapped.with_layout(overlapped.layout.but(gradient_accumulation_steps=1, pp=1, vp=1))
    assert parts_of(alone, 0).recomputed_layer == 0, "no other micro batch runs beside it"
