"""Configurations of other programs, by their keys: which program's a YAML file is, and what kit can do with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.errors import SpecError
from kit.specs.catalog import model_names
from kit.specs.strict_yaml import Document
from kit.specs.text import shown

_KEYS: Mapping[str, tuple[set[str], set[str]]] = {
    "accelerate": ({"distributed_type", "compute_environment"}, set()),
    "DeepSpeed": ({"zero_optimization", "train_micro_batch_size_per_gpu"}, set()),
    "Kubernetes": ({"apiVersion"}, {"kind"}),
    "axolotl": ({"base_model"}, set()),
    "LLaMA-Factory": ({"model_name_or_path"}, {"stage", "finetuning_type", "template", "cutoff_len"}),
    "LLaMA-Factory v1": ({"model_class", "dist_config", "peft_config"}, {"model"}),
    "TRL or the Hugging Face Trainer": ({"model_name_or_path"}, set()),
    "verl": ({"actor_rollout_ref"}, set()),
    "NeMo": ({"trainer", "exp_manager"}, {"model"}),
    "GPT-NeoX": ({"pipe_parallel_size", "pipe-parallel-size"}, set()),
    "ms-swift": ({"train_type", "tuner_type", "rlhf_type"}, {"model"}),
    "Automodel": ({"step_scheduler", "recipe_args"}, {"model", "recipe"}),
    "torchtitan": ({"parallelism", "experimental", "activation_checkpoint"}, {"training"}),
    "torchtune": ({"tokenizer", "checkpointer"}, {"model"}),
}
"""Program → keys of which one is in its files, and keys of which one is in it too, if there are such."""
_OURS = {"cluster", "extends", "schema_version"}


def program_of(data: Mapping[str, Any]) -> str:
    """The program whose configuration has these keys; empty for a recipe or a plan, and where no program is known."""
    keys = set(map(str, data))
    if keys & _OURS:
        return ""
    return next((name for name, (one, too) in _KEYS.items() if keys & one and (not too or keys & too)), "")


def refuse_other_programs(document: Document, path: Path) -> None:
    """Raises ``SpecError`` for a YAML file that is no recipe, nor one with misspelt keys."""
    from difflib import get_close_matches  # only a file without a section of a recipe needs it

    keys = list(map(str, document.data))
    meant = {"model", "job", "run", "layout"} | _OURS
    if program_of(document.data) or (keys and not any(get_close_matches(key, meant, 1) for key in keys[:100])):
        raise SpecError(f"{document.name}: no recipe: {advice(document.data, str(path))}")


def advice(data: Mapping[str, Any], path: str) -> str:
    """What such a file looks like, and the command of kit that is of use."""
    program = program_of(data)
    looks = f"it looks like a configuration of {program}" if program else "no program that kit knows has these keys"
    if program in ("accelerate", "Kubernetes"):
        return f"{looks}: kit lint {shlex.quote(path)} judges it"
    named = data.get("deepspeed")
    lint = f", and kit lint {shlex.quote(shown(named, str))} judges its file" if isinstance(named, str) else ""
    looks += ", which kit plan alone reads" if program else ""
    return f"{looks}; kit plan takes a model too, as in kit plan {model_named(data)} --gpus 8xH100{lint}"


def model_named(data: Mapping[str, Any]) -> str:
    """The catalog's name of the model that the file trains; else an example."""
    given = data.get("base_model", data.get("model_name_or_path", data.get("model")))
    name = given.rsplit("/", 1)[-1].lower() if isinstance(given, str) else ""
    return next((each for each in (name, name.removesuffix("-instruct")) if each in model_names()), "llama-3.1-8b")
