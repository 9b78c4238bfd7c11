"""Rehearses a recipe with its scaled-down copy: train, kill, resume, export, load in transformers.

The reference is plain torch in one process with the same model, data and schedule. The rehearsal compares every step's
loss and gradient norm with it, before the kill and after the resume.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.emit.run_directory import RunDirectory, write
from kit.errors import EngineError
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.preflight.check_result import require
from kit.preflight.run_checks import missing_packages
from kit.rehearsal import assets, processes, rounding
from kit.rehearsal.scaled_down import ScaledDown, scaled_down
from kit.specs.catalog import parse_cluster
from kit.specs.layout import Pins, describe
from kit.specs.run import CheckpointSpec, DataSpec, LoggingSpec, RunSpec
from kit.specs.validation import FrozenMap

STEPS = 8
SAVE_EVERY = 3
KILL_AT = 4
"""Step at which to kill the run: after the first checkpoint and before the second, so that the resumed run repeats a
step."""
LOSS_BOUND = 1e-4
NORM_BOUND = 1e-3
"""Largest relative difference from plain torch, in fp32. Engines sum in different orders: this changes a few parts in
10⁷, and Adam's steps increase the difference."""
EXPORT_BOUND = 1e-4
WEIGHT_BOUND = 1e-3
"""Largest difference of a weight (``Rehearsal.weight_difference``). Adam's step depends on rounding where gradients are
small."""
CANNOT_SHOW = (
    "speed and peak memory of a GPU",
    "kernels and collectives of CUDA and NCCL",
    "fp16, and fp8 but for its rounding",
    "faults of a network",
)


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal."""

    recipe: str
    layout: str
    """Layout of the recipe's plan, in words."""
    scaled_down: str
    processes: int
    launcher: str
    replaced: tuple[str, ...]
    loss_difference: float
    """Largest relative difference of a step's loss from plain torch."""
    norm_difference: float
    killed_at: int
    exported_difference: float
    """Relative difference of the exported model's validation loss in transformers, from that of plain torch's
    export."""
    weight_difference: float
    """Largest difference of an exported weight from plain torch's, relative to the tensor's largest weight. A
    transposed matrix hardly changes a small model's loss, but it changes this."""
    seconds: float
    in_bf16: rounding.InBf16 | None
    """The run in the recipe's own precision; None for a recipe in fp32."""

    @property
    def passed(self) -> bool:
        """Whether every difference is within its bound."""
        return (
            self.loss_difference <= LOSS_BOUND
            and self.norm_difference <= NORM_BOUND
            and self.exported_difference <= EXPORT_BOUND
            and self.weight_difference <= WEIGHT_BOUND
            and (self.in_bf16 is None or self.in_bf16.passed)
        )

    def as_json(self) -> dict[str, Any]:
        """All fields and ``passed``, as JSON values."""
        return {**dataclasses.asdict(self), "passed": self.passed}


def rehearse(name: str, plan: Plan, run: RunSpec | None, directory: Path) -> Rehearsal:
    """Rehearse a plan. Writes all files below ``directory``, which must not exist. Raises ``KitError`` if a run
    fails."""
    begin = time.monotonic()
    shrunk = scaled_down(plan)
    directory.mkdir(parents=True)
    assets.write_model(shrunk.model, directory / "model", frozen=shrunk.job.lora is not None)
    assets.write_data(shrunk.job, directory / "data")
    settings = _run(run, shrunk, directory)
    reference = write(_reference(shrunk), dataclasses.replace(settings, nvme_path=None), directory / "reference")
    own = write(make_plan(shrunk.model, shrunk.cluster, shrunk.job, shrunk.pins), settings, directory / "scaled-down")
    _check_layout(own.plan, shrunk.pins)
    require(*missing_packages(own))
    with processes.beside(reference.path):
        killed = processes.run_until_killed(own.path, KILL_AT)
    processes.run(own.path, "--resume", "auto")
    expected, found = _curve(reference), _curve(own)
    exported_loss, exported_weights = _exported(reference, own, shrunk, directory)
    return Rehearsal(
        recipe=name,
        layout=describe(plan.layout),
        scaled_down=shrunk.covers,
        processes=shrunk.cluster.num_gpus,
        launcher=_launcher(own),
        replaced=shrunk.replaced,
        loss_difference=rounding.largest(expected, found, "loss"),
        norm_difference=rounding.largest(expected, found, "grad_norm"),
        killed_at=killed,
        exported_difference=exported_loss,
        weight_difference=exported_weights,
        in_bf16=_in_bf16(shrunk, settings, reference, directory),
        seconds=time.monotonic() - begin,
    )


def _in_bf16(shrunk: ScaledDown, settings: RunSpec, reference: RunDirectory, directory: Path) -> rounding.InBf16 | None:
    """Run the scaled-down copy in the recipe's own precision, without a kill, and compare with the reference; None for
    a recipe in fp32."""
    from kit.engines.huggingface.adapters import InitialAdapters, checkpoint_shapes
    from kit.engines.huggingface.models import HfDirectory

    if shrunk.job_in_bf16 is None:
        return None
    plan = make_plan(shrunk.model, shrunk.cluster, shrunk.job_in_bf16, shrunk.pins_in_bf16)
    _check_layout(plan, shrunk.pins_in_bf16)
    saved = dataclasses.replace(settings, checkpoint=CheckpointSpec(every_steps=STEPS))
    rundir = write(plan, saved, directory / "scaled-down-bf16")
    processes.run(rundir.path)
    lora, seed = shrunk.job.lora, settings.seed
    return rounding.compare(
        (_curve(reference), _curve(rundir)),
        (_last_checkpoint(reference), _last_checkpoint(rundir)),
        shrunk,
        HfDirectory(directory / "model")
        if lora is None
        else InitialAdapters(checkpoint_shapes(shrunk.model, lora), seed),
    )


def _run(run: RunSpec | None, shrunk: ScaledDown, directory: Path) -> RunSpec:
    """Settings of a run: the recipe's schedule and data options, with the scaled-down copy's data."""
    data = run.data if run is not None else DataSpec(train="")
    base = run if run is not None else RunSpec(data=data)
    offloads = "nvme" in (shrunk.pins.offload_optimizer, shrunk.pins.offload_param)
    if offloads:
        (directory / "nvme").mkdir()
    return dataclasses.replace(
        base,
        model_path=str(directory / "model"),
        nvme_path=str(directory / "nvme") if offloads else None,
        data=dataclasses.replace(
            data,
            train=str(directory / "data/train"),
            stream=None,
            blend=FrozenMap({}),
            validation=str(directory / "data/validation"),
            validation_sets=FrozenMap({}),
            allow_many_epochs=True,
        ),
        steps=STEPS,
        checkpoint=CheckpointSpec(every_steps=SAVE_EVERY, keep_last=2, asynchronous=base.checkpoint.asynchronous),
        logging=LoggingSpec(every_steps=1),
        validation_sequences=8,
        validation_every_steps=None,
    )


def _reference(shrunk: ScaledDown) -> Plan:
    """Plan of the reference: plain torch in one process, with the same batch by gradient accumulation."""
    slow: dict[str, Any] = {"recompute": "none", "micro_batch_size": 1, "chunked_loss": False, "compile_layers": False}
    if shrunk.job.lora is not None and shrunk.job.lora.quantize_moe_experts:
        slow["recompute"] = "full"  # a rule of 4-bit experts
    pins = Pins(engine="torch", zero_stage=0, **slow)
    return make_plan(shrunk.model, parse_cluster("1xcpu"), shrunk.job, pins)


def _check_layout(plan: Plan, pins: Pins) -> None:
    """Raises EngineError if the planner changed a pin: the copy would then rehearse another layout."""
    for field in dataclasses.fields(Pins):
        wanted = getattr(pins, field.name)
        if wanted is not None and getattr(plan.layout, field.name) != wanted:
            raise EngineError(
                f"{field.name}={getattr(plan.layout, field.name)} was planned for the scaled-down copy, not {wanted}"
            )


def _curve(rundir: RunDirectory) -> dict[int, dict[str, float]]:
    """Step → its row of metrics, after a resume that of the repeated step. Raises EngineError if a step is missing."""
    rows = {int(row["step"]): row for row in processes.metrics(rundir.path)}
    if sorted(rows) != list(range(1, STEPS + 1)):
        raise EngineError(f"{rundir.path.name}: steps {sorted(rows)} were logged, not 1 to {STEPS}")
    return rows


def _last_checkpoint(rundir: RunDirectory) -> Path:
    from kit.training.checkpoint.storage import steps_in

    return next(iter(steps_in(rundir.path / "checkpoints").values()))


def _exported(reference: RunDirectory, own: RunDirectory, shrunk: ScaledDown, directory: Path) -> tuple[float, float]:
    """Export both runs and load both models in transformers. Returns (relative difference of their validation losses,
    largest difference of a weight relative to the tensor's largest weight)."""
    models = []
    for rundir in (reference, own):
        exported = directory / f"exported-{rundir.path.name}"
        models.append(_in_transformers(_last_checkpoint(rundir), exported, shrunk, directory / "model"))
    losses = [_held_out_loss(model, shrunk, directory / "data/validation") for model in models]
    if not all(math.isfinite(loss) for loss in losses):
        raise EngineError(f"losses of the exported models are {losses}")
    expected, found = ({name: p.detach() for name, p in model.named_parameters()} for model in models)
    # Relative to the tensor's largest weight, but at least to Adam's step, the learning rate. A key's bias has no
    # gradient, because softmax cancels it, and starts at zero: its whole value is rounding.
    weights = [
        float((found[name] - tensor).abs().max()) / max(float(tensor.abs().max()), shrunk.job.learning_rate)
        for name, tensor in expected.items()
    ]
    return abs(losses[1] / losses[0] - 1), max(weights)


def _in_transformers(checkpoint: Path, directory: Path, shrunk: ScaledDown, base: Path) -> Any:
    import torch

    from kit.engines.huggingface.models import auto_class
    from kit.training.checkpoint.formats import open_step
    from kit.training.checkpoint.to_huggingface import opened_to_hf

    opened_to_hf(open_step(checkpoint), directory, dtype="float32", merge_into=base if shrunk.job.lora else None)
    return auto_class(shrunk.model.is_encoder_decoder).from_pretrained(directory, dtype=torch.float32).eval()


def _held_out_loss(model: Any, shrunk: ScaledDown, data: Path) -> float:
    import torch

    from kit.training.data.indexed import IndexedTokens

    tokens = IndexedTokens(data).read(0, shrunk.job.seq_length)
    ids = torch.tensor(tokens.astype("int64"))[None]
    # ``labels`` would not work: an encoder-decoder shifts them with special tokens, which bytes do not have.
    decoder = {"decoder_input_ids": ids[:, :-1]} if shrunk.model.is_encoder_decoder else {}
    with torch.no_grad():
        logits = model(input_ids=ids if decoder else ids[:, :-1], **decoder).logits
    return float(torch.nn.functional.cross_entropy(logits[0].float(), ids[0, 1:]))


def _launcher(rundir: RunDirectory) -> str:
    text = (rundir.path / "launch.sh").read_text(encoding="utf-8")
    names = {"accelerate.commands.launch": "accelerate launch", "torch.distributed.run": "torchrun"}
    return next((name for module, name in names.items() if module in text), "python")


def render(result: Rehearsal) -> str:
    """Text of a rehearsal's result, for the terminal."""
    lines = [
        f"{result.recipe}: {'rehearsed' if result.passed else 'FAILED'} in {result.seconds:.0f} s",
        f"  plan      {result.layout}",
        f"  copy      {result.scaled_down}; {result.processes} processes by {result.launcher}",
        f"  trained   {STEPS} steps; killed after step {result.killed_at}, resumed",
        f"  curve     loss within {result.loss_difference:.1e} of plain torch (bound {LOSS_BOUND:g}), "
        f"gradient norm {result.norm_difference:.1e} ({NORM_BOUND:g})",
        f"  exported  loads in transformers, held-out loss within {result.exported_difference:.1e} ({EXPORT_BOUND:g}), "
        f"weights within {result.weight_difference:.1e} ({WEIGHT_BOUND:g})",
    ]
    if (rounded := result.in_bf16) is not None:
        lines += [
            f"  in {rounded.precision:<6} {STEPS} steps, from plain torch in fp32: loss {rounded.loss_difference:.1e}, "
            f"gradient norm {rounded.norm_difference:.1e}, moments {rounded.moment_difference:.1e} (rounding: "
            f"{rounded.bound:.1e}),",
            f"            added to the weights {rounded.update_difference:.1e} ({rounded.update_bound:.1e}); rounded "
            f"master weights {rounded.rounded_masters:.1e} ({rounding.ROUNDED_BOUND:g})",
        ]
    lines += [f"  replaced  {item}" for item in result.replaced]
    lines.append(f"  not shown {'; '.join(CANNOT_SHOW)}")
    return "\n".join(lines)
