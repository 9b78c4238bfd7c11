"""No file is unpickled but by readers that know what they may make: kit's source, call by call."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KIT = Path(__file__).parents[1] / "kit"
LOADERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
SAFE_YAML = {"SafeLoader", "CSafeLoader"}


def unsafe(source: str) -> list[str]:
    """What of a module's calls could run what a file says."""
    tree = ast.parse(source)
    modules, direct = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name).split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            direct |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    restricted = [
        base
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(getattr(part, "name", "") == "find_class" for part in node.body)
        for base in node.bases
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and node not in restricted:
            name = full_name(node, modules, direct)
            if name.split(".")[0] in LOADERS and name.split(".")[-1] in ("load", "loads", "Unpickler", "open"):
                found.append(f"line {node.lineno}: {name}")
        if not isinstance(node, ast.Call):
            continue
        name, given = full_name(node.func, modules, direct), {each.arg: each.value for each in node.keywords}
        if name == "torch.load" and not is_constant(given.get("weights_only"), True):
            found.append(f"line {node.lineno}: torch.load without weights_only=True")
        if name == "torch.load" and "pickle_module" in given:
            found.append(f"line {node.lineno}: torch.load with a pickle module")
        if name.endswith("load_checkpoint_and_dispatch") or name in ("torch.jit.load", "torch.package.PackageImporter"):
            found.append(f"line {node.lineno}: {name}")
        if "allow_pickle" in given and not is_constant(given["allow_pickle"], False):
            found.append(f"line {node.lineno}: allow_pickle")
        if name in ("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"):
            found.append(f"line {node.lineno}: {name}")
        if name in ("yaml.load", "yaml.load_all"):
            loader = given.get("Loader", node.args[1] if len(node.args) > 1 else None)
            if full_name(loader, modules, direct).split(".")[-1] not in SAFE_YAML | safe_loaders(tree):
                found.append(f"line {node.lineno}: {name} without a safe loader")
    return found


def full_name(node: ast.AST | None, modules: dict[str, str], direct: dict[str, str]) -> str:
    """The dotted name of what is called, as the module's imports resolve it."""
    if isinstance(node, ast.Name):
        return direct.get(node.id) or modules.get(node.id) or node.id
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, modules, direct)}.{node.attr}"
    return "?"


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def safe_loaders(tree: ast.AST) -> set[str]:
    """Classes of the module itself that extend a safe loader."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(getattr(base, "attr", getattr(base, "id", "")) in SAFE_YAML for base in node.bases)
    }


@pytest.mark.parametrize("path", sorted(KIT.rglob("*.py")), ids=lambda path: str(path.relative_to(KIT)))
def test_nothing_in_kit_unpickles_unchecked(path):
    assert unsafe(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load('a')",
        "import torch\ntorch.load('a', weights_only=False)",
        "import torch as t\nt.load('a', weights_only=which)",
        "from torch import load\nload('a')",
        "import torch\ntorch.load('a', weights_only=True, pickle_module=mine)",
        "import pickle\npickle.load(file)",
        "import pickle as p\np.loads(data)",
        "from pickle import loads\nloads(data)",
        "import pickle\npickle.Unpickler(file).load()",
        "import pickle\nclass Mine(pickle.Unpickler):\n    pass",
        "import numpy as np\nnp.load('a', allow_pickle=True)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.unsafe_load(text)",
        "import dill\ndill.load(file)",
    ],
)
def test_it_would_be_found(source):
    assert unsafe(source)
