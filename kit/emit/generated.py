"""``ds_configs/`` and ``launch/``: the files of every shipped recipe, committed so that they can be read and copied.

``kit emit --check`` compares them with the recipes, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

from kit.emit.run_directory import files_of
from kit.emit.templates import NVME_PATH, TEMPLATES, with_nvme_path
from kit.errors import PlanError
from kit.planner.describe import describe
from kit.planner.plan import Plan
from kit.planner.search import make_plan
from kit.specs.recipe import load_recipe
from kit.specs.shipped import recipe_names, recipe_path

LAUNCHED = (
    "launch.sh",
    "launch_elastic.sh",
    "launch_hosts.sh",
    "hostfile",
    ".deepspeed_env",
    "slurm.sbatch",
    "accelerate.yaml",
    "megatron.yaml",
)


def shipped_files() -> dict[str, str]:
    """Path, relative to the root of a checkout → text."""
    files = {f"ds_configs/{template.name}.json": template.text() for template in TEMPLATES}
    rows: list[str] = []
    for name in recipe_names():
        plan = shipped_plan(name)
        if plan is None or plan.cluster.gpu.device == "cpu":
            continue  # plans that do not fit have no files; rehearsals on a CPU are not for copying
        texts = files_of(plan)
        for file in LAUNCHED:
            if file in texts:
                files[f"launch/{name}/{file}"] = texts[file]
        if "ds_config.json" in texts:
            run = load_recipe(recipe_path(name)).run
            nvme_path = (run and run.nvme_path) or NVME_PATH
            config = with_nvme_path(json.loads(texts["ds_config.json"]), nvme_path)
            files[f"ds_configs/{name}.json"] = json.dumps(config, indent=2) + "\n"
            files[f"ds_configs/{name}.md"] = texts["ds_config.md"]
            rows.append(f"| [{name}]({name}.json) | {describe(plan.layout)} | [why]({name}.md) |")
    files["ds_configs/README.md"] = _configs_page(rows)
    return files


def check(root: Path) -> list[str]:
    """What differs in a checkout, one line each; empty where every file is as its recipe says."""
    wanted = shipped_files()
    problems = []
    for name, text in wanted.items():
        path = root / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.read_text(encoding="utf-8") != text:
            problems.append(f"{name} is not what its recipe says today")
    return problems + [f"{name} follows from no recipe" for name in _present(root) if name not in wanted]


def write(root: Path) -> list[str]:
    """Write them all, and remove what follows from no recipe. Returns the names that changed."""
    wanted = shipped_files()
    changed = []
    for name in _present(root):
        if name not in wanted:
            (root / name).unlink()
            changed.append(name)
    for name, text in wanted.items():
        path = root / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(name)
        if path.suffix == ".sh":
            path.chmod(0o755)
    return changed


def _present(root: Path) -> list[str]:
    files = (path for folder in ("ds_configs", "launch") for path in (root / folder).rglob("*") if path.is_file())
    return sorted(path.relative_to(root).as_posix() for path in files)


def shipped_plan(name: str) -> Plan | None:
    """Today's plan of a recipe that comes with kit; None where none fits or is legal."""
    recipe = load_recipe(recipe_path(name))
    try:
        return make_plan(recipe.model, recipe.cluster, recipe.job, recipe.layout)
    except PlanError:
        return None


def _configs_page(rows: list[str]) -> str:
    templates = "\n".join(f"| [{template.name}]({template.name}.json) | {template.when} |" for template in TEMPLATES)
    return f"""# DeepSpeed configurations

Written by `kit emit --write-shipped`, checked by `kit emit --check`; do not edit them here.

## Templates, for the Hugging Face Trainer

`"auto"` is filled in by the Trainer from its arguments. The numbers belong to the model that each was planned for (8B
mostly): `kit emit` makes those of yours.

| file | when |
|---|---|
{templates}

## Of the recipes

Numbers throughout, for `deepspeed.initialize`, an `Accelerator`, or kit's own loop; how to start each is in `launch/`.

| file | layout | reasons |
|---|---|---|
{chr(10).join(rows)}
"""
