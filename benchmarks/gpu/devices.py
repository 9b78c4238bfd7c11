"""CUDA against CPU: the rehearsal models in fp32, gradients of step 1 by parameter and losses step by step.

The reference is plain torch on the CPU. On ``--device cpu`` it is repeated, and has to be the same bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

import kit
from benchmarks.gpu.cases import machine
from benchmarks.gpu.measured import built_engine
from kit.emit.run_directory import write
from kit.engines.full_tensors import full_tensors
from kit.engines.protocol import StateKind
from kit.training.data.loader import DataLoader
from tests.support.assets import COMMON, FAMILIES, RECIPE, model_variant, prepare
from tests.support.compare import compare_gradients, compare_runs

BOUND = 1e-4
"""Largest relative error of any parameter's gradient, and of any loss: other kernels, other orders of sums, the same
arithmetic (TF32 is off). Twice a gradient, or two matrices swapped, are 1."""


def models(device: str) -> tuple[str, ...]:
    """Families that plain torch runs; the other engines run only the first."""
    return tuple(FAMILIES) if device == "cuda" else ("llama", "mixtral")


def curves(engine: str, on: str, device: str, scratch: Path, out: Path) -> dict[str, Any]:
    """Writes losses and gradients of every model below ``out``, for one device and engine.

    ``on``: device of this run. ``device``: device of the whole program, which decides the number of models.
    """
    prepare()
    for family in models(device) if engine == "torch" else ("llama",):
        words = list(COMMON)
        if FAMILIES[family]:
            words += [*FAMILIES[family], f"run.model_path={model_variant(family, FAMILIES[family])}"]
        # Last, because later arguments take precedence. Three steps are enough to use the second moments.
        words += ["run.steps=3", f"layout.engine={engine}", "layout.micro_batch_size=4"]
        recipe = kit.load_recipe(RECIPE, words)
        assert recipe.run is not None
        plan = kit.plan(recipe.model, machine(on, scratch), recipe.job, recipe.layout)
        rundir = write(plan, recipe.run, scratch / f"parity-{family}")
        where = out / family
        where.mkdir(parents=True)
        with built_engine(rundir) as built:
            feed, rows = DataLoader.open(plan, recipe.run, built), []
            for step in range(recipe.run.steps or 0):
                loss = built.forward_backward(feed.step(step * plan.layout.global_batch_size)).mean
                if step == 0:
                    save_file(full_tensors(built, StateKind.GRADIENT), where / "gradients.safetensors")
                rows.append({"step": step + 1, "loss": loss, "grad_norm": built.apply(1e-3).gradient})
        (where / "curve.json").write_text(json.dumps(rows), encoding="utf-8")
    return {"models": [path.name for path in sorted(out.iterdir())]}


def missing(reference: Path, other: Path) -> list[str]:
    """Models of ``other`` that the reference has not finished."""
    return [folder.name for folder in sorted(other.iterdir()) if not (reference / folder.name / "curve.json").exists()]


def agreement(reference: Path, other: Path, device: str) -> list[dict[str, Any]]:
    """One row per model; the reference must have all models."""
    bound = 0.0 if device == "cpu" and other.name == "torch" else BOUND
    rows = []
    for folder in sorted(other.iterdir()):
        expected = reference / folder.name
        gradients = compare_gradients(expected / "gradients.safetensors", folder / "gradients.safetensors")
        curve = [json.loads((path / "curve.json").read_text(encoding="utf-8")) for path in (expected, folder)]
        loss, norm = (each.worst_relative_error for each in compare_runs(*curve).values())
        rows.append(
            {
                "model": folder.name,
                "gradient_error": gradients.worst_relative_error,
                "at": gradients.worst,
                "loss_error": loss,
                "norm_error": norm,
                "bound": bound,
                "agrees": max(gradients.worst_relative_error, loss, norm) <= bound,
            }
        )
    return rows
