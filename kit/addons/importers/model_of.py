"""The model of a checkpoint that does not say it: by what is beside it, or by ``--model``."""

from __future__ import annotations

from pathlib import Path

from kit.addons.importers.peft import CONFIG, adapter_config
from kit.addons.importers.stored import reader_errors
from kit.errors import CheckpointError
from kit.planner.plan import Plan
from kit.specs.catalog import load_model
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec


def plan_of_run(path: Path, model: str | None = None) -> Plan | None:
    """The plan of the run directory that contains the checkpoint or is named by ``model``; None if none does."""
    plan = (path.resolve().parent.parent if model is None else Path(model)) / "plan.yaml"
    return Plan.load(plan) if plan.is_file() else None


def adapters_of_run(path: Path, model: str | None) -> LoraSpec | None:
    """The adapters that the run directory trains, which contains the checkpoint or is named by ``model``."""
    plan = plan_of_run(path, model)
    return None if plan is None else plan.job.lora


def model_of(path: Path, model: str | None) -> ModelSpec:
    """The model named by ``model``, otherwise that of a ``config.json`` in the checkpoint or beside it, that of the
    adapters' base, or of the run directory that contains the checkpoint."""
    if model is None:
        for directory in (path, path.parent):
            if (directory / "config.json").is_file():
                return load_model(str(directory))
        if (path / CONFIG).is_file():
            config = adapter_config(path)
            with reader_errors(path / CONFIG, "peft"):
                base = Path(str(config["base_model_name_or_path"]))
                if (base / "config.json").is_file():
                    return load_model(str(base))
    if (plan := plan_of_run(path, model)) is not None:
        return plan.model
    if model is None:
        raise CheckpointError(
            f"{path} does not say what model it is of; add --model with its Hugging Face directory, the run "
            f"directory, or a catalog name"
        )
    return load_model(model)
