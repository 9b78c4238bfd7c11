"""What worker processes run for the tests of this package, and how what they find is compared."""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import engines
from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.models import random_model
from kit.engines.kernels import compiled_blocks
from kit.engines.protocol import StateKind
from kit.engines.torch.engine import TorchEngine
from kit.engines.torch.fsdp import local_shard
from kit.planner.plan import Plan
from kit.training.checkpoint.manifest import kinds_of
from kit.training.counters import Counters
from tests.support import tiny
from tests.support.calls import before
from tests.support.checkpoints import captured, export, load
from tests.support.workers import pool
from tests.training import runs
from tests.training.batches import micro_batches

KINDS = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
COUNTERS = Counters(step=3, samples_seen=24, tokens_seen=768, optimizer_steps=3, samples_skipped=0)


def state(engine: Any, kind: StateKind) -> dict[str, torch.Tensor]:
    """One kind of state on the main rank, {} elsewhere."""
    return full_tensors(engine, kind)


def own(engine: TorchEngine) -> dict[tuple[str, str], torch.Tensor]:
    """All that a rank holds, copied: masters and the optimizer's own tensors, bit for bit."""
    parameters = {name: each.detach() for name, each in engine._parameters.items()}
    moments = {str(number): each for number, each in enumerate(engine._optimizer.moments())}
    masters = parameters | dict(engine._buffers.export(StateKind.MASTER))
    return {("master", n): local_shard(each).clone() for n, each in masters.items()} | {
        ("moment", n): each.clone() for n, each in moments.items()
    }


def held(engine: Any) -> dict[Any, torch.Tensor]:
    """All that a checkpoint has of an engine: full tensors on the main rank, and on each what only its layout has."""
    own = {name: tensor.clone() for name, tensor in engine.private_tensors().items()}
    kinds = kinds_of(engine.optimizer_name)
    return own | {(kind, name): each for kind in kinds for name, each in state(engine, kind).items()}


def build(rundir: tiny.TinyRunDirectory) -> Any:
    """The plan's engine, with the plan's settings where the run directory has none. Blocks that are compiled run
    operator by operator, traced as for a GPU. A chunked loss takes 24 tokens at a time, which divide no micro batch of
    these.

    DeepSpeed refuses fp16 on CPU processes because they are slow at it: its accelerator is told that they take it, and
    the planner's rule is not asked."""
    compiled_blocks.BACKEND = "aot_eager"
    given = rundir if rundir.settings else runs.with_settings(rundir)
    with pytest.MonkeyPatch.context() as patch:
        if rundir.plan.job.precision == "fp16":
            from deepspeed.accelerator import get_accelerator

            type(get_accelerator()).is_fp16_supported = lambda self: True
            patch.setattr(engines, "violations", lambda workload: ())
        engine = TorchEngine(given) if given.plan.layout.engine == "torch" else engines.build_engine(given)
    if getattr(engine, "_chunked", None) is not None:
        engine._chunked._chunk_tokens = 24
    return engine


def batches(engine: Any, rundir: tiny.TinyRunDirectory, step: int, masked: bool = True):
    """This rank's micro batches of a step."""
    layout = rundir.plan.layout
    return micro_batches(
        step,
        mbs=layout.micro_batch_size,
        accumulation=layout.gradient_accumulation_steps,
        dp_rank=engine.dp_rank,
        dp_size=engine.dp_size,
        masked=masked,
    )


def steps(engine: Any, rundir: tiny.TinyRunDirectory, first: int, count: int, rate: float = 1e-2, rows: Any = batches):
    """(mean loss, gradient norm) of each step."""
    return [
        (engine.forward_backward(rows(engine, rundir, step)).mean, engine.apply(rate).gradient)
        for step in range(first, first + count)
    ]


def train(
    rundir: tiny.TinyRunDirectory, rate: float = 1e-2, rows: Any = batches, of_step: int = 0, fault: str | None = None
) -> dict[str, Any]:
    """Three steps, with the gradients of one; a checkpoint; two steps more, and these again by an engine that loads a
    copy of that moment, which is written only then. ``fault``: one of tests.system.parity in the engine."""
    from tests.system.parity.faults import planted

    with planted(fault):
        engine, found = build(rundir), {"first": [], "gradients": {}}
        for step in range(3):
            loss = engine.forward_backward(rows(engine, rundir, step))
            if step == of_step:
                found |= {"gradients": state(engine, StateKind.GRADIENT), "held": engine.memory_bytes()}
            found["first"].append((loss.mean, engine.apply(rate).gradient))
        export(engine, rundir.path / "step", rundir.plan, COUNTERS)
        write = captured(engine, rundir.plan, COUNTERS)
        found |= {"tokens": loss.tokens, "evaluated": engine.evaluate(rows(engine, rundir, 50)).mean}
        found |= {kind: state(engine, kind) for kind in KINDS}
        found |= {"after": steps(engine, rundir, 3, 2, rate, rows), "steps": engine.optimizer_steps}
        found |= {"ended": state(engine, StateKind.MASTER)}
        write(rundir.path / "later")
        bits = own if isinstance(engine, TorchEngine) else held
        ended = bits(engine)
        engine.close()
        with closing(build(rundir)) as engine:
            load(engine, rundir.path / "later", rundir.plan, same_layout=True)
            found["again"] = steps(engine, rundir, 3, 2, rate, rows)
            found["same bits"] = same(bits(engine), ended)
    return found


def resumed(
    rundir: tiny.TinyRunDirectory, rate: float = 1e-2, rows: Any = batches, of_step: int = 0, fault: str | None = None
) -> dict[str, Any]:
    """``train``, and what its last two steps are from its checkpoint as another layout reads it: "elsewhere"."""
    from tests.system.parity.faults import planted

    with planted(fault):
        found = train(rundir, rate, rows, of_step)
        return found | {"elsewhere": resume(rundir, rundir.path / "step", rate, rows)}


def not_to_the_bit(found: dict[str, Any]) -> list[str]:
    """What of ``resumed`` differs from the undisturbed run."""
    elsewhere = found["elsewhere"]
    equal = {
        "by files": found["same bits"] and found["again"] == found["after"],
        "loaded": all(same(elsewhere["loaded"][kind], found[kind]) for kind in KINDS),
        "steps": (found["steps"], elsewhere["steps"]) == (5, 3),
        "curve elsewhere": elsewhere["after"] == found["after"],
        "masters elsewhere": same(elsewhere["ended"], found["ended"]),
    }
    return [what for what, is_so in equal.items() if not is_so]


def first_step(rundir: tiny.TinyRunDirectory, fault: str | None = None) -> dict[str, Any]:
    """Of ``train`` what its first backward leaves: mean loss, gradients, and the bytes that a rank holds."""
    from tests.system.parity.faults import planted

    with planted(fault), closing(build(rundir)) as engine:
        loss = engine.forward_backward(batches(engine, rundir, 0))
        return {"loss": loss.mean, "gradients": state(engine, StateKind.GRADIENT), "held": engine.memory_bytes()}


def resume(rundir: tiny.TinyRunDirectory, checkpoint: Path, rate: float = 1e-2, rows: Any = batches) -> dict[str, Any]:
    """From a checkpoint of ``train``: its state, two steps, and the masters that these end with."""
    with closing(build(rundir)) as engine:
        assert load(engine, checkpoint, rundir.plan) == COUNTERS
        return {
            "loaded": {kind: state(engine, kind) for kind in KINDS}, "steps": engine.optimizer_steps,
            "after": steps(engine, rundir, 3, 2, rate, rows), "ended": state(engine, StateKind.MASTER),
        }  # fmt: skip


_alone: dict[str, dict[str, Any]] = {}


def alone(path: Path, plan: Plan, *arguments: Any, act: Any = train, **run: Any) -> dict[str, Any]:
    """What ``act`` finds of a plan in one process, once a session."""
    key = f"{plan.digest} {arguments} {act.__name__} {run}"
    if key not in _alone:
        (_alone[key],) = pool("torch", 1).run(act, tiny.run_directory(path, plan, **run), *arguments)
    return _alone[key]


def agree(path: Path, one: Plan, split: Plan, *arguments: Any, bound: float = 1e-5, **run: Any) -> list[dict[str, Any]]:
    """What ``split`` trains is what ``one`` process does: gradients, curve, evaluation, weights; every rank says the
    same. Its checkpoint resumes to the bit, and goes on in one process. Returns what ranks found."""
    expected = alone(path / "one", one, *arguments, **run)
    engine, ranks = split.layout.engine, split.layout.world_size
    found = pool(engine, ranks).run(train, tiny.run_directory(path / "split", split, **run), *arguments)
    main = found[0]
    for each in found:
        assert each["same bits"]
        assert each["after"] == each["again"]
        assert all(each[key] == main[key] for key in ("first", "tokens", "evaluated", "after", "steps"))
    assert (main["tokens"], main["steps"]) == (expected["tokens"], 5)
    # By an engine that began with other weights.
    other = tiny.run_directory(path / "on", one, **run | {"seed": 1})
    (again,) = pool("torch", 1).run(resume, other, path / "split" / "step", *arguments[:2])
    assert same(again["loaded"][StateKind.MASTER], main[StateKind.MASTER])
    assert numbers(again["after"]) == pytest.approx(numbers(expected["after"]), rel=bound)
    near(main, expected, bound)
    assert main["evaluated"] == pytest.approx(expected["evaluated"], rel=bound)
    assert worst(main[StateKind.MASTER], expected[StateKind.MASTER]) < bound
    return found


def fault_shows(path: Path, one: Plan, split: Plan, fault: str) -> bool:
    """Whether gradients of an engine with a fault in it are far from those of one process."""
    found = pool("torch", split.layout.world_size).run(first_step, tiny.run_directory(path / "split", split), fault)[0]
    return worst(found["gradients"], alone(path / "one", one)["gradients"]) > 1e-3


def near_in_bf16(path: Path, one: Plan, split: Plan, cosine: float = 0.99) -> dict[str, torch.Tensor]:
    """Gradients of ``split`` in bf16. They and the loss are near those of one process in fp32, and not the same."""
    rounded = dataclasses.replace(split, job=dataclasses.replace(split.job, precision="bf16"))
    found = pool("torch", split.layout.world_size).run(first_step, tiny.run_directory(path / "bf16", rounded))[0]
    expected = alone(path / "one", one)
    assert expected["first"][0][0] != found["loss"] == pytest.approx(expected["first"][0][0], rel=1e-2)
    assert (
        min(
            torch.cosine_similarity(found["gradients"][name].flatten(), gradient.flatten(), dim=0)
            for name, gradient in expected["gradients"].items()
        )
        > cosine
    )
    return found["gradients"]


def near(found: dict[str, Any], expected: dict[str, Any], bound: float = 1e-5) -> None:
    """Two of ``train``: the same losses, norms and gradients."""
    for key in ("first", "after"):
        assert numbers(found[key]) == pytest.approx(numbers(expected[key]), rel=bound)
    assert worst(found["gradients"], expected["gradients"]) < bound


def numbers(curve: list[tuple[float, float]]) -> list[float]:
    """Losses and norms in one row."""
    return [number for step in curve for number in step]


def same(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> bool:
    """Bit for bit, under the same names."""
    return found.keys() == expected.keys() and all(torch.equal(found[key], each) for key, each in expected.items())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest magnitude; 0 of two that are zero."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest ``relative_error`` of tensors of the same names."""
    assert found.keys() == expected.keys() != set()
    return max(relative_error(found[name], tensor) for name, tensor in expected.items())


def relative(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> float:
    """‖found − expected‖ / ‖expected‖ of all tensors together."""
    assert found.keys() == expected.keys() != set()
    apart = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return math.sqrt(apart / sum(float(tensor.double().square().sum()) for tensor in expected.values()))


def saved(path: Path, plan: Plan, dtype: torch.dtype = torch.float32, seed: int = 3) -> str:
    """A directory of random weights of the plan's model, as transformers saves it. Norms and biases begin as ones and
    zeros, which any order of names would fit: here they are random too."""
    model = random_model(plan.model, seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    model.save_pretrained(path / "hf")
    return str(path / "hf")


def saved_on_host(rundir: tiny.TinyRunDirectory) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Bytes of each tensor that goes to the host, and the gradients."""
    from kit.engines.kernels.offloaded_inputs import OffloadedInputs

    sizes, engine = list[int](), TorchEngine(rundir)
    with pytest.MonkeyPatch.context() as patch:
        before(patch, OffloadedInputs, "copy", lambda lane, target, source: sizes.append(source.nbytes))
        engine.forward_backward(batches(engine, rundir, 0))
    return sizes, state(engine, StateKind.GRADIENT)
