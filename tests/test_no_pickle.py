"""No file is unpickled but by readers that know what they may make: kit's source, call by call."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

KIT = Path(__file__).parents[1] / "kit"
LOADERS = re.compile(
    r"(pickle|_pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve|jsonpickle)\..*\b(load|loads|Unpickler|open)"
    r"|yaml\.(unsafe_load|full_load)(_all)?|torch\.(jit\.load|package\.PackageImporter)|.*load_checkpoint_and_dispatch"
)
SAFE = re.compile(r"C?SafeLoader")


def unsafe(source: str) -> Iterator[str]:
    """What of a module's calls could run what a file says."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {alias.asname or alias.name: f"{getattr(node, 'module', None) or ''}.{alias.name}".removeprefix(".")
             for node in imports for alias in node.names}  # fmt: skip

    def called(node: ast.AST | None) -> str:
        """The dotted name of what is called, as the module's imports resolve it."""
        first, dot, rest = ("" if node is None else ast.unparse(node)).partition(".")
        return f"{known.get(first, first)}{dot}{rest}"

    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {each.name for each in classes if any(SAFE.search(ast.unparse(base)) for base in each.bases)}
    restricted = [base for each in classes for base in each.bases
                  if any(getattr(part, "name", "") == "find_class" for part in each.body)]  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and node not in restricted and LOADERS.fullmatch(called(node)):
            yield f"line {node.lineno}: {called(node)}"
        if isinstance(node, ast.Call):
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            loader = given.get("Loader", ast.unparse(node.args[1]) if len(node.args) > 1 else "")
            if (
                (
                    called(node.func) == "torch.load"
                    and (given.get("weights_only") != "True" or "pickle_module" in given)
                )
                or given.get("allow_pickle", "False") != "False"
                or (called(node.func) in ("yaml.load", "yaml.load_all") and not (SAFE.search(loader) or loader in own))
            ):
                yield f"line {node.lineno}: {called(node.func)}"


def test_nothing_in_kit_unpickles_unchecked():
    found = {str(path): list(unsafe(path.read_text())) for path in KIT.rglob("*.py")}
    assert len(found) > 300
    assert {path: calls for path, calls in found.items() if calls} == {}


UNSAFE = [
    "import torch\ntorch.load('a')",
    "import torch\ntorch.load('a', weights_only=False)",
    "import torch as t\nt.load('a', weights_only=which)",
    "from torch import load\nload('a')",
    "import torch\ntorch.load('a', weights_only=True, pickle_module=mine)",
    "import torch\ntorch.jit.load('a')",
    "import accelerate\naccelerate.load_checkpoint_and_dispatch(model, 'a')",
    "import pickle\npickle.load(file)",
    "import pickle as p\np.loads(data)",
    "from pickle import loads\nloads(data)",
    "import pickle\npickle.Unpickler(file).load()",
    "import pickle\nclass Mine(pickle.Unpickler):\n    pass",
    "import numpy as np\nnp.load('a', allow_pickle=True)",
    "import yaml\nyaml.load(text, Loader=yaml.Loader)",
    "import yaml\nyaml.load(text)",
    "import yaml\nyaml.load_all(text, yaml.FullLoader)",
    "import yaml\nyaml.unsafe_load(text)",
    "import dill\ndill.load(file)",
]
SAFE_CALLS = [
    "import torch\ntorch.load('a', weights_only=True)",
    "import yaml\nyaml.load(text, yaml.CSafeLoader)",
    "import yaml\nclass Mine(yaml.SafeLoader):\n    pass\nyaml.load(text, Loader=Mine)",
    "import pickle\nclass Mine(pickle.Unpickler):\n    def find_class(self, module, name):\n        raise Error",
]


@pytest.mark.parametrize("source", [*UNSAFE, *SAFE_CALLS])
def test_what_is_unsafe_would_be_found_and_what_is_safe_is_left_alone(source):
    assert bool(list(unsafe(source))) == (source in UNSAFE)
