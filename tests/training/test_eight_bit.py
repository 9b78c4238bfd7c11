"""AdamW with moments of 8 bits: beside AdamW in fp32, its bytes beside the plan's, and what checkpoints keep of it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from kit.cost.memory.peak import parts_of
from kit.engines import eight_bit
from kit.engines.base import StateKind
from kit.engines.huggingface.models import parameter_shapes
from kit.engines.torch.engine import TorchEngine
from kit.errors import CheckpointError
from kit.specs.job import OptimizerSpec
from kit.specs.optimizers import BLOCK
from kit.training.checkpoint.transfer import export_exchange, import_exchange
from tests.support import tiny
from tests.support.workers import pool
from tests.training import cases

EPS = 1e-3
"""Large: early Adam is sign descent."""
MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
LARGEST_GAP = {StateKind.EXP_AVG: 0.0141, StateKind.EXP_AVG_SQ: 0.0071}
"""Between neighbours of a table, 0.9/64 and 0.9/128 near 1; elsewhere less (arXiv 2110.02861, section 2.2)."""


def directory(path, name="adamw-8bit", **layout) -> tiny.TinyRunDirectory:
    """Two layers whose matrices, halved or not, are whole blocks."""
    job = {"optimizer": OptimizerSpec(name=name, eps=EPS)}
    return tiny.run_directory(path, tiny.plan(job=job, **({"gradient_accumulation_steps": 4} | layout)))


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """‖found − expected‖ / ‖expected‖ of all tensors together."""
    apart = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return math.sqrt(apart / sum(float(tensor.double().square().sum()) for tensor in expected.values()))


@pytest.mark.usefixtures("one_process")
class TestOneProcess:
    def test_a_step_rounds_moments_to_the_nearest_and_weights_not_at_all(self, tmp_path):
        whole, short = (TorchEngine(directory(tmp_path / name, name)) for name in ("adamw", "adamw-8bit"))
        for engine in (whole, short):
            cases.steps(engine, directory(tmp_path), 0, 1)
        masters = [cases.state(engine, StateKind.MASTER) for engine in (whole, short)]
        assert relative(masters[1], masters[0]) < 1e-7
        for kind in MOMENTS:
            exact, found = cases.state(whole, kind), cases.state(short, kind)
            for name, values in exact.items():
                if values.ndim == 1:
                    assert torch.equal(found[name], values), "vectors stay in fp32"
                    continue
                blocks = values.view(-1, BLOCK)
                scales = blocks.abs().amax(1, keepdim=True)
                bound = scales * LARGEST_GAP[kind] / 2
                error = (found[name].view(-1, BLOCK) - blocks).abs()
                assert (error <= bound * 1.001).all(), (kind, name)
                assert error.max() > 0, "nothing was rounded"
                # Below a tenth of the scale gaps are a fifth: of a table evenly spaced this is not true.
                small = blocks.abs() < 0.09 * scales
                assert (error <= 0.21 * bound)[small].all(), (kind, name)

    def test_it_learns_as_adamw_does(self, tmp_path):
        """The paper's claim in small: the same loss, and 20 steps end a few hundredths of AdamW's way from its end."""
        start, ends, curves = None, [], []
        for name in ("adamw", "adamw-8bit"):
            rundir = directory(tmp_path / name, name)
            engine = TorchEngine(rundir)
            start = cases.state(engine, StateKind.MASTER)
            curves.append([cases.steps(engine, rundir, 0, 1)[0][0] for _ in range(20)])  # one batch, learnt by heart
            ends.append(cases.state(engine, StateKind.MASTER))
        ways = [{name: end[name] - start[name] for name in end} for end in ends]
        assert 1e-3 < relative(ways[1], ways[0]) < 0.05
        assert curves[1] == pytest.approx(curves[0], rel=1e-2)
        assert curves[0][-1] < 0.2 * curves[0][0]

    def test_adapters_too(self, tmp_path):
        from kit.engines.huggingface.adapters import adapter_shapes
        from kit.engines.huggingface.models import build_model
        from kit.specs.job import LoraSpec

        build_model(directory(tmp_path / "seed"), torch.float32, "cpu").save_pretrained(tmp_path / "hf")
        lora = LoraSpec(rank=16)
        job = {"optimizer": OptimizerSpec(name="adamw-8bit", eps=EPS), "lora": lora}
        rundir = tiny.run_directory(tmp_path, tiny.plan(job=job), model_path=str(tmp_path / "hf"))
        engine = TorchEngine(rundir)
        adapters = sum(math.prod(shape) for shape in adapter_shapes(tiny.model(), lora).values())
        assert engine.held_bytes()["optimizer"] == (2 + 8 / BLOCK) * adapters == planned_optimizer_bytes(rundir)
        cases.steps(engine, rundir, 0, 1)
        assert engine.optimizer_steps == 1

    @pytest.mark.parametrize("grad_clip", [0.0, 0.05])
    def test_gradients_in_bf16_lose_nothing_on_one_gpu(self, tmp_path, grad_clip):
        """Backward makes them in bf16, one micro batch and one rank add nothing to that. Norms are summed in another
        order, which clipping hands on."""
        found = []
        for kept in ("fp32", "bf16"):
            rundir = short_gradients(tmp_path / kept, kept, grad_clip)
            engine = TorchEngine(rundir)
            curve = cases.steps(engine, rundir, 0, 3)
            engine.forward_backward(cases.batches(engine, rundir, 3))
            gradients = {name: parameter.grad for name, parameter in engine._parameters.items()}
            held = engine.held_bytes()["gradients"]
            found.append((curve, cases.state(engine, StateKind.MASTER), held, gradients))
            assert held == planned_gradient_bytes(rundir)
        (whole, masters, whole_bytes, _), (short, short_masters, short_bytes, gradients) = found
        assert min(norm for _, norm in whole) > grad_clip, "clipping is active where there is any"
        assert short == [pytest.approx(step, rel=1e-6) for step in whole]
        if grad_clip:
            assert relative(short_masters, masters) < 1e-6
        else:
            assert all(torch.equal(short_masters[name], masters[name]) for name in masters)
        assert short_bytes < 0.51 * whole_bytes
        assert {g.dtype for g in gradients.values() if g.ndim > 1} == {torch.bfloat16}
        assert {g.dtype for g in gradients.values() if g.ndim == 1} == {torch.float32}

    @pytest.mark.parametrize(("wrote", "reads"), [("adamw", "adamw-8bit"), ("adamw-8bit", "adamw")])
    def test_another_optimizers_files_are_refused(self, tmp_path, wrote, reads):
        TorchEngine(directory(tmp_path, wrote)).save(tmp_path)
        with pytest.raises(CheckpointError, match=f"optimizer.name={reads} needs"):
            TorchEngine(directory(tmp_path, reads)).load(tmp_path)

    def test_an_exchange_checkpoint_has_fp32_moments(self, tmp_path):
        """AdamW takes them over as they are; 8 bits round them once more."""
        rundir = directory(tmp_path)
        engine = TorchEngine(rundir)
        cases.steps(engine, rundir, 0, 3)
        export_exchange(engine, tmp_path / "exchange", cases.COUNTERS, model=rundir.plan.model)
        expected = {kind: cases.state(engine, kind) for kind in (StateKind.MASTER, *MOMENTS)}
        after = cases.steps(engine, rundir, 3, 2)
        for name, error in (("adamw", 0.0), ("adamw-8bit", 0.01)):
            fresh = TorchEngine(directory(tmp_path / name, name))
            import_exchange(fresh, tmp_path / "exchange")
            assert fresh.optimizer_steps == 3
            assert relative(cases.state(fresh, StateKind.MASTER), expected[StateKind.MASTER]) == 0
            for kind in MOMENTS:
                assert relative(cases.state(fresh, kind), expected[kind]) <= error, (name, kind)
            assert cases.steps(fresh, rundir, 3, 2) == [pytest.approx(step, rel=1e-3) for step in after]


def short_gradients(path, kept, grad_clip=1.0, dp=1) -> tiny.TinyRunDirectory:
    """FSDP2 in bf16, one micro batch."""
    job = {"optimizer": OptimizerSpec(name="adamw-8bit", eps=EPS), "precision": "bf16", "grad_clip": grad_clip}
    return tiny.run_directory(path, tiny.plan(job=job, zero_stage=3, dp=dp, gradient_dtype=kept))


def planned_gradient_bytes(rundir: tiny.TinyRunDirectory) -> float:
    """Gradient bytes of a rank after backward, by the cost model. It counts vectors as matrices, though they stay in
    fp32."""
    plan, short = rundir.plan, rundir.plan.layout.gradient_dtype == "bf16"
    states = parts_of(plan.workload, 0).states
    vectors = sum(math.prod(s) for s in parameter_shapes(plan.model).values() if len(s) == 1)
    return states.gradients + (2 * vectors / plan.layout.dp if short else 0)


def planned_optimizer_bytes(rundir: tiny.TinyRunDirectory) -> float:
    """Optimizer bytes of a rank, by the cost model."""
    plan = rundir.plan
    return parts_of(plan.workload, 0).states.optimizer


def train_kill_resume(rundir: tiny.TinyRunDirectory):
    """Three steps, a native checkpoint, two more; and the two again from the files, by an engine of its own."""
    engine = TorchEngine(rundir)
    before = cases.steps(engine, rundir, 0, 3)
    saved = rundir.path / "saved"
    if engine.is_main:
        saved.mkdir()
    torch.distributed.barrier()
    engine.snapshot()(saved, None)
    torch.distributed.barrier()
    after, ended = cases.steps(engine, rundir, 3, 2), own(engine)
    held = engine.held_bytes()["optimizer"]
    states = {kind: cases.state(engine, kind) for kind in (StateKind.MASTER, *MOMENTS)}
    engine.close()
    resumed = TorchEngine(rundir)
    resumed.load(saved)
    found = {"curve": before + after, "held": held, "allocated": allocated(resumed), "states": states}
    found["same steps"] = cases.steps(resumed, rundir, 3, 2) == after
    again = own(resumed)
    found["same bits"] = again.keys() == ended.keys() and all(torch.equal(again[key], ended[key]) for key in ended)
    resumed.close()
    return found


def own(engine: TorchEngine) -> dict[tuple[str, str], torch.Tensor]:
    """All that a rank holds, copied; codes and scales as such."""
    return {(kind, name): each.clone() for kind, some in engine._local_state().items() for name, each in some.items()}


def allocated(engine: TorchEngine) -> int:
    """Bytes of the storages behind the moments: what was asked of the allocator, whatever views say."""
    held = [each for p in engine._parameters.values() for each in engine._optimizer.local_state(p).values()]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}.values())


SPLITS = {
    "DDP": {"zero_stage": 0, "dp": 2, "gradient_accumulation_steps": 2},
    "FSDP2, stage 2": {"zero_stage": 2, "dp": 2, "gradient_accumulation_steps": 2},
    "FSDP2, stage 3": {"zero_stage": 3, "dp": 2, "gradient_accumulation_steps": 2},
    "FSDP2, tensor parallel": {"zero_stage": 3, "tp": 2, "gradient_accumulation_steps": 4},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in one process."""
    rundir = directory(tmp_path_factory.mktemp("alone"))
    (found,) = pool("torch", 1).run(train_kill_resume, rundir)
    assert found["held"] == found["allocated"] == planned_optimizer_bytes(rundir)
    assert found["same steps"]
    assert found["same bits"]
    return found


@pytest.mark.everyday("DDP")
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_agree_with_one(tmp_path, alone, split):
    """And hold the bytes that are planned, and go on from their own files to the bit.

    Blocks of halved matrices are those of whole ones here, so that little differs but roundings of the gradients,
    which a code near the middle between two takes to its neighbour; columns cut by tensor parallelism make others.
    """
    rundir = directory(tmp_path, **SPLITS[split])
    ranks = pool("torch", 2).run(train_kill_resume, rundir)
    for found in ranks:
        assert found["same steps"]
        assert found["same bits"]
        assert found["held"] == found["allocated"] == planned_optimizer_bytes(rundir)
    bound = 2e-3 if "tensor" in split else 1e-4
    assert ranks[0]["curve"] == [pytest.approx(step, rel=bound) for step in alone["curve"]]
    assert relative(ranks[0]["states"][StateKind.MASTER], alone["states"][StateKind.MASTER]) < bound
    for kind in MOMENTS:
        assert relative(ranks[0]["states"][kind], alone["states"][kind]) < (0.05 if "tensor" in split else 1e-3), kind


def test_pieces_change_no_number(monkeypatch):
    """Partitions are stepped in pieces, because kernels count in 32 bits."""
    generator = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(5 * BLOCK + 7, generator=generator) for _ in range(2))
    found = []
    for piece in (eight_bit.PIECE, 2 * BLOCK):
        monkeypatch.setattr(eight_bit, "PIECE", piece)
        weight, moments = values.clone(), {kind: eight_bit.zero_moment(kind, values) for kind in MOMENTS}
        moments[StateKind.EXP_AVG].write(values)
        eight_bit.step(weight, gradient, moments, OptimizerSpec(name="adamw-8bit"), 1, 1e-2)
        found.append([weight, *(moment.read() for moment in moments.values())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert not torch.equal(found[0][0], values)


def test_slices_that_are_no_whole_blocks(tmp_path):
    """The last block of a rank's slice is short."""
    spec = tiny.model(hidden_size=24, ffn_hidden_size=36, head_dim=6)
    job = {"optimizer": OptimizerSpec(name="adamw-8bit", eps=EPS)}
    rundirs = [
        tiny.run_directory(tmp_path / str(dp), tiny.plan(spec, job=job, dp=dp, zero_stage=stage, **accumulation))
        for dp, stage, accumulation in (
            (1, 0, {"gradient_accumulation_steps": 2}),
            (2, 3, {"gradient_accumulation_steps": 1}),
        )
    ]
    (one,) = pool("torch", 1).run(train_kill_resume, rundirs[0])
    two = pool("torch", 2).run(train_kill_resume, rundirs[1])
    assert all(found["same steps"] and found["same bits"] for found in (one, *two))
    assert two[0]["curve"] == [pytest.approx(step, rel=2e-3) for step in one["curve"]]
    # A scale more for each short block: a few bytes, which the plan leaves out.
    short = 2 * 4 * len(spec_matrices(rundirs[1]))
    assert planned_optimizer_bytes(rundirs[1]) <= two[0]["held"] <= planned_optimizer_bytes(rundirs[1]) + short


def gradients_and_norm(rundir: tiny.TinyRunDirectory):
    """(bytes held, planned, norm told, norm of what is exported) of a rank."""
    engine = TorchEngine(rundir)
    engine.forward_backward(cases.batches(engine, rundir, 0))
    exported = cases.state(engine, StateKind.GRADIENT)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in exported.values()))
    found = engine.held_bytes()["gradients"], planned_gradient_bytes(rundir), engine.gradient_norm(), norm
    engine.apply(1e-2)
    engine.close()
    return found


def test_gradients_in_bf16_over_two_ranks(tmp_path):
    """The mean over ranks is rounded once. The norm is computed from the rounded gradients, summed in fp32."""
    whole, short = (
        pool("torch", 2).run(gradients_and_norm, short_gradients(tmp_path / kept, kept, dp=2))[0]
        for kept in ("fp32", "bf16")
    )
    for held, planned, norm, exported in (whole, short):
        assert held == planned
        assert norm == pytest.approx(exported, rel=1e-6)
    assert short[2] == pytest.approx(whole[2], rel=2**-9)
    assert short[2] != whole[2]


def spec_matrices(rundir: tiny.TinyRunDirectory) -> list[str]:
    """Names of the model's matrices."""
    return [name for name, shape in parameter_shapes(rundir.plan.model).items() if len(shape) > 1]


def test_the_plan_says_what_it_saves():
    """8B on one GPU of 140 GiB, where AdamW in fp32 does not fit beside sums of gradients; a step moves fewer bytes."""
    import kit
    from kit.specs.catalog import load_model

    def planned(name: str, **pins):
        job = kit.JobSpec(seq_length=4096, global_batch_size=4, optimizer=OptimizerSpec(name=name))
        return kit.plan(load_model("llama-3.1-8b"), "1xH200", job, kit.Pins(engine="torch", micro_batch_size=1, **pins))

    with pytest.raises(kit.KitError, match="does not fit on 1 x H200"):
        planned("adamw", paged_optimizer=False)
    found = planned("adamw-8bit", zero_stage=0)
    assert found.predicted.peak_gib < 133
    whole, short = (planned(name, zero_stage=3).predicted for name in ("adamw", "adamw-8bit"))
    saved = whole.memory[0].components_gib["optimizer"] - short.memory[0].components_gib["optimizer"]
    assert saved == pytest.approx((8 - 2 - 8 / BLOCK) * 8.03e9 / 2**30, rel=1e-3)
    assert short.step_time_components_s["optimizer"] < 0.75 * whole.step_time_components_s["optimizer"]


def test_8b_fits_one_gpu_of_80_gib():
    """With gradients in bf16: 4 + 2 + 2.03 bytes a parameter. AdamW in fp32 is 62 GiB away."""
    import kit

    def planned(name: str, **pins):
        job = kit.JobSpec(seq_length=4096, global_batch_size=4, optimizer=OptimizerSpec(name=name))
        return kit.plan("llama-3.1-8b", "1xH100", job, kit.Pins(engine="torch", **pins))

    found = planned("adamw-8bit", zero_stage=3, gradient_dtype="bf16")
    assert (found.layout.micro_batch_size, found.layout.recompute) == (4, "full")
    assert 60 < found.predicted.peak_gib < 75
    for name in ("adamw", "adamw-8bit"):
        with pytest.raises(kit.KitError, match="does not fit on 1 x H100"):
            planned(name, zero_stage=3, paged_optimizer=False)


def test_checkpoints_are_smaller():
    from kit.cost.reliability import checkpoint_bytes

    whole = tiny.plan().workload
    job = dataclasses.replace(whole.job, optimizer=OptimizerSpec(name="adamw-8bit"))
    ratio = checkpoint_bytes(dataclasses.replace(whole, job=job)) / checkpoint_bytes(whole)
    assert ratio == pytest.approx((4 + 2 + 8 / BLOCK) / 12)
