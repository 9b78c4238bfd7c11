"""Write ``kit/addons/lint/layer_classes.yaml``: the classes of modules of each family.

    python scripts/layer_classes.py > kit/addons/lint/layer_classes.yaml

From the installed transformers, whose sources are parsed, not imported. FSDP finds the layers to wrap by the name of
their class.
"""

from __future__ import annotations

import ast
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import yaml

from kit.specs.families import FAMILIES


def classes(family: str) -> list[str]:
    """Names of the classes in the modeling file of a family."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    directory = family.removesuffix("_text")
    source = Path(spec.origin).parent / "models" / directory / f"modeling_{directory}.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return sorted(
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.endswith("Output")
    )


if __name__ == "__main__":
    table = {"version": version("transformers"), "families": {family: classes(family) for family in sorted(FAMILIES)}}
    print("# Written by scripts/layer_classes.py from the installed transformers.")
    print(yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=110), end="")
