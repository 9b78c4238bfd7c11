"""Write ``kit/addons/lint/trainer_arguments.yaml``: the Trainer's arguments, their defaults, and those it dropped.

    python scripts/trainer_arguments.py [FORMER…] > new.yaml && mv new.yaml kit/addons/lint/trainer_arguments.yaml

The arguments are those of transformers' own parser, ``HfArgumentParser(TrainingArguments)``. ``FORMER`` are earlier
training_args.py, as their wheels have them: what these define and the parser refuses is dropped. The names of the
present table are looked at too, so that without ``FORMER`` it stays as it is. It was made with those of 4.0.0, 4.20.0,
4.30.0, 4.40.0 and 4.57.3.
"""

from __future__ import annotations

import ast
import sys
from enum import Enum
from pathlib import Path

import transformers
import yaml
from transformers import HfArgumentParser, TrainingArguments

TABLE = Path(__file__).parents[1] / "kit/addons/lint/trainer_arguments.yaml"


def fields(source: str) -> set[str]:
    """The public fields of ``TrainingArguments`` in a training_args.py."""
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    (arguments,) = (node for node in classes if node.name == "TrainingArguments")
    targets = (node.target for node in arguments.body if isinstance(node, ast.AnnAssign))
    return {target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("_")}


def known_arguments(former: set[str]) -> dict[str, object]:
    """``{version, defaults: {argument: default}, dropped: [argument]}``."""
    actions = HfArgumentParser(TrainingArguments)._actions  # type: ignore[arg-type]
    defaults = {}
    for action in actions:
        if action.option_strings[0] == f"--{action.dest}" and action.dest != "help":
            value = action.default
            defaults[action.dest] = value.value if isinstance(value, Enum) else value
    refused = {name for name in former if not any(f"--{name}" in action.option_strings for action in actions)}
    version = transformers.__version__
    return {"version": version, "defaults": dict(sorted(defaults.items())), "dropped": sorted(refused)}


if __name__ == "__main__":
    names = set().union(*(fields(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]))
    if TABLE.exists():
        names |= set(yaml.safe_load(TABLE.read_text(encoding="utf-8"))["dropped"])
    print("# Written by scripts/trainer_arguments.py from the installed transformers and earlier ones.")
    print(yaml.safe_dump(known_arguments(names), sort_keys=False), end="")
