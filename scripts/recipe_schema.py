"""JSON schema of a recipe file, for editors: ``python scripts/recipe_schema.py``.

Descriptions are the strings beneath the fields. They are read here and not by pydantic, which would parse the source of
every spec whenever anything of kit is imported: a tenth of the time of a plan.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from itertools import pairwise
from typing import Any

from kit.specs.cluster import ClusterSpec
from kit.specs.extra import Extra
from kit.specs.job import JobSpec
from kit.specs.layout import Layout, Pins
from kit.specs.model import ModelSpec
from kit.specs.run import RunSpec
from kit.specs.validation import Text, adapter, spec


@spec
class RecipeFile:
    """A recipe of kit: a model, a cluster, a job, and what the planner must not choose."""

    model: Text | ModelSpec
    """Catalog name, path of a Hugging Face directory, or a shape."""
    cluster: Text | ClusterSpec
    """For example ``8xH100`` or ``aws:p5.48xlarge:4``, a YAML file, ``local``, or a description: of what differs from
    ``node``, or of everything."""
    job: JobSpec = JobSpec()
    run: RunSpec | None = None
    layout: Pins = Pins()
    extra: Extra = Extra()
    extends: Text | None = None
    """Another recipe file, whose keys hold where this one is silent; one level deep."""


def json_schema() -> dict[str, Any]:
    """Draft 2020-12."""
    schema = adapter(RecipeFile).json_schema()
    parts = {RecipeFile.__name__: schema, **schema["$defs"]}
    for kind in (RecipeFile, *_specs()):
        if (part := parts.get(kind.__name__)) is not None:
            for name, text in _strings_beneath(Layout if kind is Pins else kind).items():
                part["properties"].get(name, {})["description"] = text
    # A variant says only what differs; what is missing in the whole is found when it is loaded.
    for part in (schema, schema["$defs"]["RunSpec"], schema["$defs"]["DataSpec"]):
        part.pop("required", None)
    cluster = schema["$defs"]["ClusterSpec"]
    del cluster["required"]  # a node of the catalog has the rest
    cluster["properties"] |= {
        "node": {"type": "string", "description": "Node of the catalog that the other keys change: p5.48xlarge."},
        "gpu": {"anyOf": [{"type": "string"}, cluster["properties"]["gpu"]]},
    }
    _let_counts_be_text(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "kit recipe"}


def _let_counts_be_text(part: Any) -> None:
    """Whole numbers may also be written as ``kit.specs.count`` reads them: ``20B``."""
    if isinstance(part, dict) and part.get("type") == "integer":
        part |= {"type": ["integer", "string"], "pattern": r"^ *[0-9][0-9_,.]*([eE]\+?[0-9]+)? ?[MBTmbt]? *$"}
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _let_counts_be_text(inner)


def _specs() -> list[type]:
    modules = [module for name, module in sys.modules.items() if name.startswith("kit.specs.")]
    return [value for module in modules for value in vars(module).values() if hasattr(value, "__pydantic_config__")]


def _strings_beneath(spec: type) -> dict[str, str]:
    """Field → the string literal that follows it in the source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(spec))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = inspect.cleandoc(str(after.value.value))
    return found


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
