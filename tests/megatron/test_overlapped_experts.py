"""What a plan counts while all-to-alls are overlapped."""

from __future__ import annotations

import pytest

from kit.cost.memory.peak import parts_of
from kit.cost.memory.rank_megatron import layer_saved
from kit.cost.workload import Workload
from kit.specs.catalog import load_model
from tests.support.models import cluster, job, megatron


@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (2, 2)])
def test_a_forward_beside_a_backward_has_one_layer_more_alive(pp, vp):
    """Not one micro batch more: megatron-core's schedule takes a layer of each in turn (models/common/
    model_chunk_schedule_plan.py, TransformerModelChunkSchedulePlan.run). The plan counts that layer in backward."""
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
