"""Writes DeepSpeed's universal checkpoint, from which DeepSpeed continues on every ZeRO stage and world size.

The layout is that of DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, as its engines read it with
``{"checkpoint": {"load_universal": true}}`` (runtime/base_optimizer.py, runtime/zero/stage3.py, runtime/engine.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from kit.addons.importers.universal import FILES
from kit.engines.huggingface.experts import FusedExpertsSource
from kit.engines.huggingface.models import build_skeleton, hf_config
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.training.checkpoint.formats import Opened
from kit.training.counters import Counters

_DEEPSPEED = "0.19.8"
"""The version whose layout this is; DeepSpeed refuses files that name none."""
_GROUPS = 64
"""DeepSpeed's stages 1 and 2 load as many of their parameter groups as the file has, and skip further ones silently."""
_OF_THE_TRAINER = ("trainer_state.json", "scheduler.pt")
"""What the Hugging Face Trainer needs beside DeepSpeed's files; copied where it is."""


def write_universal(opened: Opened, partial: Path, dtype: torch.dtype, beside: Path) -> None:
    """Write into ``partial`` in fp32, one tensor at a time. ``beside``: the checkpoint that is converted.

    Raises CheckpointError if Adam's state is missing.
    """
    model, sources, counters = opened.model, opened.sources, opened.counters
    if len(sources) < len(FILES):
        raise CheckpointError(
            f"{beside} has no state of Adam, which DeepSpeed's load_universal needs; start DeepSpeed from the weights "
            f"(--to hf) instead"
        )
    shapes = {name: parameter.shape for name, parameter in build_skeleton(model).named_parameters()}
    step, steps = counters.step, counters.optimizer_steps
    tag = f"global_step{step}_universal"
    for kind, source in sources.items():
        fused = FusedExpertsSource(model, source, list(shapes))
        for name in shapes:
            file = f"{tag}/zero/{name}/{FILES[kind]}"
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            torch.save({"param": fused.read(name).float().clone()}, partial / file)
            if kind is StateKind.MASTER:
                # A tensor: torch's AdamW adds to it in place, and DeepSpeed's kernels take it as a number.
                torch.save(torch.tensor(float(steps)), (partial / file).with_name("step.pt"))
    # Stage 3 gives one count to all of its parts. It is a number, because all would add to one tensor. The groups
    # have no learning rate, betas or decay: those of the ds_config that continues stay.
    groups = [{"step": steps} for _ in range(_GROUPS)]
    state = {"state": {0: {"step": steps}}, "param_groups": groups}
    common = {"ds_version": _DEEPSPEED, "param_groups": groups, "optimizer_state_dict": state}
    torch.save(common, partial / tag / "zero" / "optimizer_state.pt")
    # Stage 3 looks for another name than the other stages.
    for prefix in ("", "zero_pp_rank_0_"):
        torch.save(_engine_state(shapes, counters), partial / tag / f"{prefix}mp_rank_00_model_states.pt")
    (partial / "latest_universal").write_text(tag, encoding="utf-8")
    hf_config(model).save_pretrained(partial)
    for path in (beside / name for name in _OF_THE_TRAINER):
        if path.is_file():
            shutil.copyfile(path, partial / path.name)


def _engine_state(shapes: Mapping[str, torch.Size], counters: Counters) -> dict[str, object]:
    """What DeepSpeed's engine reads beside the parameters."""
    steps = counters.optimizer_steps
    # Of DeepSpeed's own schedules the first, of torch's and transformers' LambdaLR the others.
    schedule = {"last_batch_iteration": steps - 1, "last_epoch": steps, "_step_count": steps + 1, "lr_lambdas": []}
    return {
        "module": {},
        "param_shapes": [dict(shapes)],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": counters.step,
        "global_samples": counters.samples_seen,
        "skipped_steps": counters.step - steps,
        "lr_scheduler": schedule,
        "ds_version": _DEEPSPEED,
    }
