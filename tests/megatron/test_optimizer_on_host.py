"""Megatron's optimizer on the host trains as the one on the GPU does, bit for bit, and each half is where it belongs.

On a CPU all memory is the host's. kit's patch of ``is_cuda`` makes megatron-core choose parameters as beside a GPU.
"""

from __future__ import annotations

import pytest

from kit.engines.protocol import StateKind
from tests.megatron import cases
from tests.support import tiny
from tests.support.workers import pool
from tests.training.cases import build, same

LAYOUTS = {
    "dp2": ("llama", {"num_layers": 4}, {"dp": 2}),
    "dp2-tp2-sp": ("llama", {"num_layers": 4}, {"dp": 2, "tp": 2, "sp": True}),
    "dp2-ep2-mixtral": ("mixtral", {"num_layers": 2}, {"dp": 2, "ep": 2}),
}


def steps_and_places(rundir, steps=3):
    """Inside a worker: (losses and norms, kind of state → exported tensors, bytes stepped on the host, on the GPU)."""
    from kit.engines.megatron.optimizer import HostAdam, inner_optimizers

    engine = build(rundir)
    numbers = cases.steps(engine, rundir, 0, steps)
    exported = {kind: cases.export(engine, kind) for kind in (StateKind.MASTER, StateKind.EXP_AVG_SQ)}
    inner = [each for chained in engine._optimizer.chained_optimizers for each in inner_optimizers(chained.optimizer)]
    stepped = dict.fromkeys((True, False), 0)
    for each in inner:
        stepped[isinstance(each, HostAdam)] += sum(
            main.nbytes for group in each.param_groups for main in group["params"]
        )
    held = engine.memory_bytes()
    engine.close()
    return numbers, exported, stepped[True], stepped[False], held


@pytest.mark.everyday("dp2")
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_share_on_the_host_trains_bit_for_bit_as_none(references, name):
    family, shape, layout = LAYOUTS[name]
    spec = tiny.model(family, vocab_size=127, **shape)

    def trained(**offload):
        rundir = cases.run_directory(
            references(spec)[0] / "run", spec, job={"precision": "bf16"}, zero_stage=1, **layout, **offload
        )
        return pool("megatron", rundir.plan.layout.world_size).run(steps_and_places, rundir)

    on_gpu = trained()
    for share in (0.5, 1.0):
        on_host = trained(offload_optimizer="cpu", optimizer_offload_fraction=share)
        assert on_host[0][0] == on_gpu[0][0]
        assert [kind for kind, expected in on_gpu[0][1].items() if not same(on_host[0][1][kind], expected)] == []
        for (*_, host, gpu, held), (*_, whole, held_on_gpu) in zip(on_host, on_gpu, strict=True):
            assert host + gpu == whole
            # megatron-core moves whole parameters until it has moved the share.
            assert share * whole <= host <= share * whole + 4 * spec.vocab_size * spec.hidden_size
            assert held == held_on_gpu
