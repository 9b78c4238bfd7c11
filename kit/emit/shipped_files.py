"""``ds_configs/`` and ``launch/``: committed copies of every shipped recipe's files, and one DeepSpeed configuration
for the Hugging Face Trainer per kind of sharding.

``kit emit --check`` compares them with the recipes, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.emit.deepspeed import ds_config, with_nvme_path
from kit.emit.derived_file import json_text
from kit.emit.extra import plan_of_recipe
from kit.emit.run_directory import DERIVED_FILES, files_of
from kit.emit.trainer import for_trainer, trainer_config
from kit.errors import PlanError
from kit.planner.describe import describe
from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from kit.specs.layout import Pins
from kit.specs.recipe import load_recipe
from kit.specs.shipped import recipe_names, recipe_path

NVME_PATH = "/mnt/nvme"
"""Placeholder for a folder on every node's own disk."""


@dataclass(frozen=True)
class Template:
    """A kind of sharding, and a plan that has it."""

    name: str
    when: str
    cluster: str
    pins: dict[str, Any]
    model: str = "llama-3.1-8b"
    seq_length: int = 4096

    def text(self) -> str:
        """JSON: for the Trainer if it can run the plan, otherwise with the plan's numbers."""
        job = JobSpec(seq_length=self.seq_length, global_batch_size=128, total_tokens=10**9)
        # The Trainer needs Hugging Face layers; without these pins the planner may choose Megatron's layers.
        model: dict[str, Any] = {"implementation": "huggingface", "tp": 1}
        pins = Pins(engine="deepspeed", **model, **self.pins)
        plan = make_plan(load_model(self.model), parse_cluster(self.cluster), job, pins)
        config = trainer_config(plan) if for_trainer(plan) else ds_config(plan)
        return json_text(with_nvme_path(config, NVME_PATH))


TEMPLATES = (
    Template(
        "zero1",
        "everything fits except the optimizer state; the least communication",
        "8xH100",
        {"zero_stage": 1},
        model="llama-3.2-1b",
    ),
    Template("zero2", "the weights fit on one GPU; gradients and optimizer state do not", "8xH100", {"zero_stage": 2}),
    Template(
        "zero2-offload",
        "the weights fit on one GPU; the optimizer state needs host memory",
        "8xA100-40",
        {"zero_stage": 2, "offload_optimizer": "cpu"},
    ),
    Template(
        "zero3",
        "the weights do not fit on one GPU: each layer is gathered when it is needed",
        "8xA100-80",
        {"zero_stage": 3},
    ),
    Template(
        "zero3-offload",
        "the training state does not fit on all GPUs together, but in host memory",
        "8xA100-40",
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        model="llama-2-13b",
    ),
    Template(
        "zero-infinity-nvme",
        "the training state does not fit in host memory either: optimizer state and weights on the node's disks",
        "dgx-h100",
        {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
        model="llama-3-70b",
    ),
    Template(
        "zero++",
        "links between nodes are slow: ZeRO-3 gathers weights inside a node and in int8, and reduces gradients in int4",
        "16xA100-80",
        {"zero_stage": 3, "zero_hpz": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    ),
    Template(
        "ulysses",
        "sequences are too long for one GPU: all-to-alls split the heads; not for the Trainer",
        "8xH100",
        {"zero_stage": 3, "cp": 8, "cp_comm_type": "a2a"},
        seq_length=131072,
    ),
)
"""Templates, from the simplest to the slowest, then those for several nodes and for long sequences."""


def shipped_files() -> dict[str, str]:
    """Path, relative to the root of a checkout → text."""
    files = {f"ds_configs/{template.name}.json": template.text() for template in TEMPLATES}
    rows: list[str] = []
    for name in recipe_names():
        plan = shipped_plan(name)
        if plan is None or plan.cluster.gpu.device == "cpu":
            continue  # plans that do not fit have no files; rehearsals on a CPU are not for copying
        texts = files_of(plan)
        files |= {f"launch/{name}/{f.name}": texts[f.name] for f in DERIVED_FILES if f.committed and f.name in texts}
        if "ds_config.json" in texts:
            run = load_recipe(recipe_path(name)).run
            nvme_path = (run and run.nvme_path) or NVME_PATH
            files[f"ds_configs/{name}.json"] = json_text(with_nvme_path(ds_config(plan), nvme_path))
            files[f"ds_configs/{name}.md"] = texts["ds_config.md"]
            rows.append(f"| [{name}]({name}.json) | {describe(plan.layout)} | [why]({name}.md) |")
    files["ds_configs/README.md"] = _configs_page(rows)
    return files


def check(root: Path) -> list[str]:
    """Differences between a checkout's files and its recipes, one per line; empty if there are none."""
    return [
        f"{name} follows from no recipe"
        if text is None
        else f"{name} is not what its recipe says today"
        if (root / name).is_file()
        else f"{name} is missing"
        for name, text in _changes(root).items()
    ]


def write_shipped(root: Path) -> list[str]:
    """Writes all files, and removes files without a recipe. Returns the names of changed files."""
    changes = _changes(root)
    for name, text in changes.items():
        path = root / name
        if text is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    return list(changes)


def _changes(root: Path) -> dict[str, str | None]:
    """Name → text to write, or None for a file without a recipe."""
    files = (path for folder in ("ds_configs", "launch") for path in (root / folder).rglob("*") if path.is_file())
    present = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(files)}
    wanted = shipped_files()
    changed = {name: text for name, text in wanted.items() if present.get(name) != text}
    return {**changed, **{name: None for name in present if name not in wanted}}


def shipped_plan(name: str) -> Plan | None:
    """The plan of a shipped recipe; None if no layout is legal or fits."""
    recipe = load_recipe(recipe_path(name))
    try:
        return plan_of_recipe(recipe)
    except PlanError:
        return None


def _configs_page(rows: list[str]) -> str:
    templates = "\n".join(f"| [{template.name}]({template.name}.json) | {template.when} |" for template in TEMPLATES)
    return f"""# DeepSpeed configurations

Written by `kit emit --write-shipped`, checked by `kit emit --check`; do not edit them here.

## Templates, for the Hugging Face Trainer

The Trainer fills in `"auto"` from its arguments. The numbers fit the model that each template was planned for (mostly
8B). `kit emit` computes them for your model.

| file | when |
|---|---|
{templates}

## Configurations of the recipes

They hold numbers only, for `deepspeed.initialize`, an `Accelerator`, or kit's own loop. `launch/` has the commands that
start each.

| file | layout | reasons |
|---|---|---|
{chr(10).join(rows)}
"""
