"""What attention keeps for backward under context parallelism, and layers whose modules are computed again, against the
cost model."""

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


@pytest.mark.parametrize(
    ("family", "split", "modules"),
    [("llama", {}, ("mlp",)), ("mixtral", {"etp": 2}, ("moe",)), ("mixtral", {"etp": 2}, ("mlp",))],
    ids=["mlp", "moe", "no mlp"],
)
def test_modules_computed_again_keep_nothing(tmp_path, family, split, modules):
    """The difference to a layer that keeps everything is what the cost model takes out; a CPU's norms cancel."""
    kept, counted = [], []
    for number, recompute in enumerate(({}, {"recompute": "selective", "recompute_modules": modules})):
        spec = tiny.model(family, num_layers=2)
        layout = {"tp": 2, "sp": True} | split | recompute
        rundir = cases.run_directory(tmp_path / str(number), spec, model_path=None, **layout)
        kept.append(pool("megatron", 2).run(cases.inside, rundir, inside.kept_bytes)[0])
        setup = Workload(spec, rundir.plan.cluster, rundir.plan.job, rundir.plan.layout)
        counted.append(2 * sum(saved_terms(setup, bool(spec.num_experts)).values()))
    assert kept[0] - kept[1] == pytest.approx(counted[0] - counted[1], rel=0.03)
    assert (counted[0] == counted[1]) == (modules == ("mlp",) and family == "mixtral")
