"""Write ``kit/addons/targets/program_fields.json``: settings of the programs in ``kit/addons/targets/programs.py``.

    pip download --no-deps -d WHEELS axolotl==0.19.0 llamafactory==0.9.5 ms-swift==4.6.0 verl==0.9.1 openrlhf==0.11.2
    python scripts/program_fields.py WHEELS TORCHTITAN > kit/addons/targets/program_fields.json

TORCHTITAN is a checkout of its repository at the commit of ``programs.py``. Nothing is imported or installed: names
are read from the sources. Of transformers' and accelerate's own arguments the test asks the installed packages.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import yaml

from kit.addons.targets.programs import PROGRAMS

READ = "2026-11-26"
"""Date on which the sources were read."""
_CLASSES = {
    "axolotl": r"axolotl/(utils/schemas/.*|integrations/.*/args)\.py",
    "llamafactory": r"llamafactory/hparams/.*\.py",
    "ms-swift": r"swift/((megatron/)?arguments/.*|trainers/arguments)\.py",
}
"""Target → files whose classes have a setting per field."""


def of_classes(source: str) -> Iterator[str]:
    """Names of annotated fields of every class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.target.id


def of_one_class(source: str, name: str) -> list[str]:
    """Names of annotated fields of one class."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == name]
    return list(of_classes(ast.unparse(found[0])))


def dotted(data: Any, prefix: str = "") -> Iterator[str]:
    """Keys of nested mappings, ``a.b.c``."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield f"{prefix}{key}"
        yield from dotted(value, f"{prefix}{key}.")


def fields(wheels: Path, torchtitan: Path) -> dict[str, set[str]]:
    """Target → names of its settings."""
    texts: dict[str, str] = {}
    for wheel in wheels.glob("*.whl"):
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith((".py", "_generated_ppo_trainer.yaml"))]
            texts |= {name: archive.read(name).decode() for name in names}
    found = {
        target: {name for path, text in texts.items() if re.fullmatch(pattern, path) for name in of_classes(text)}
        for target, pattern in _CLASSES.items()
    }
    of_verl = dotted(yaml.safe_load(texts["verl/trainer/config/_generated_ppo_trainer.yaml"]))
    found["verl"] = {name for name in of_verl if re.match(r"(actor_rollout_ref|algorithm|data|trainer)\.", name)}
    flags = (re.findall(r'"--([\w.{}]+)"', text) for path, text in texts.items() if "openrlhf/cli/train_" in path)
    models = ("actor", "critic")  # train_ppo_ray.py adds the optimizer's flags in a loop over these
    found["openrlhf"] = {flag.replace("{prefix}", model) for each in flags for flag in each for model in models}
    config = (torchtitan / "torchtitan/config/configs.py").read_text(encoding="utf-8")
    sections = {"training": "TrainingConfig", "parallelism": "ParallelismConfig"}
    found["torchtitan"] = {f"{part}.{name}" for part, kind in sections.items() for name in of_one_class(config, kind)}
    return found


if __name__ == "__main__":
    recorded = {
        target: {"version": PROGRAMS[target][1], "read": READ, "fields": " ".join(sorted(names))}
        for target, names in fields(Path(sys.argv[1]), Path(sys.argv[2])).items()
    }
    print(json.dumps(recorded, indent=1))
