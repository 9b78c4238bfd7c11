"""What attention keeps for backward under context parallelism, against the cost model."""

from __future__ import annotations

import pytest

from kit.cost.memory.rank_megatron import saved_terms
from kit.cost.workload import Workload
from tests.megatron import cases, inside
from tests.support import tiny
from tests.support.workers import pool

VARIANTS = ({}, {"cp_comm_type": "p2p"}, {"recompute": "selective"})


def test_gathered_keys_the_ring_and_attention_computed_again(tmp_path):
    uncounted = []
    for number, variant in enumerate(VARIANTS):
        measured = []
        for layers in (2, 3):
            spec = tiny.model(num_layers=layers)
            rundir = cases.run_directory(tmp_path / f"{number}-{layers}", spec, model_path=None, cp=2, **variant)
            measured.append(pool("megatron", 2).run(cases.inside, rundir, inside.kept_bytes)[0])
        plan = rundir.plan
        tokens = plan.layout.micro_batch_size * plan.job.seq_length / plan.layout.cp
        per_token = (measured[1] - measured[0]) / tokens
        setup = Workload(spec, plan.cluster, plan.job, plan.layout)
        uncounted.append(per_token - sum(saved_terms(setup, False).values()) / setup.tokens)
    gathered, ring, again = uncounted
    # The formulas are for CUDA. On a CPU norms keep more, in each variant alike, and the mask of rank 0's second chunk
    # of queries, which sees all keys, is a tensor: 8 queries, 32 keys, 4 bytes.
    assert again == pytest.approx(ring, abs=0.2)
    assert gathered - ring == pytest.approx(8 * 32 * 4 / tokens, abs=0.2)
