"""What the structure of a checkout measures: ``python scripts/measure.py [ROOT ...]``, a column a checkout.

Sizes of each room; import circles of any kind; public names with two meanings in a package; functions that take model,
cluster, job and layout one by one; floors of kit/cost; how deep ``kit plan`` and ``kit emit`` go; what mypy covers.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kit", "tests", "benchmarks")
TRAINS = {"run", "trained", "resumed", "same_curve"}
QUADRUPLE = {"model", "cluster", "job", "layout"}
RECIPE = "llama-3.1-8b-sft-zero2-8xh100"
TWICE_ALLOWED = {
    ("kit/emit", "FILES"): "the files of a target: one for each target",
    ("kit/emit", "PLAN_OWNED_KEYS"): "keys that a plan decides: one for each target",
    ("kit/cost", "layer_terms"): "saved activations of a layer: one for each implementation of layers",
    ("kit/cost", "layer_input"): "what is kept of a layer under recompute: one for each implementation of layers",
    ("kit/cost", "rank_parts"): "memory of a rank by part: one for each implementation of layers",
    ("kit/emit", "applies"): "whether a target has files for a plan: one for each target",
    ("kit/addons/targets", "FILES"): "files of a target: one for each target",
    ("kit/addons/probe", "trace"): "what the probe runs: one for each implementation",
}
"""(room, name) → why it may stand in several files of the room."""
Graph = dict[str, set[str]]


class Parsed(Mapping[str, ast.Module]):
    """Name → tree, parsed when it is first asked for."""

    def __init__(self, files: Mapping[str, str], parse: Callable[[str], ast.Module]) -> None:
        self._files, self._parse = files, parse

    def __getitem__(self, name: str) -> ast.Module:
        return self._parse(self._files[name])

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class Checkout:
    """Parsed files of one checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        names = sorted(path.relative_to(root).as_posix() for room in ROOMS for path in (root / room).rglob("*.py"))
        self.texts = {name: (root / name).read_text(encoding="utf-8") for name in names}
        parse = functools.cache(lambda name: ast.parse(self.texts[name]))
        self.trees = Parsed({name: name for name in names}, parse)
        self.kit = Parsed({_module(name): name for name in names if name.startswith("kit/")}, parse)

    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """Room → (files, lines, statements without imports and docstrings)."""
        found: dict[str, tuple[int, int, int]] = {}
        for name in self.trees:
            parts = name.split("/")
            depth = 3 if parts[:2] == ["kit", "addons"] else 2
            room = "/".join(parts[:depth]) if len(parts) > depth else f"{parts[0]}/*.py"
            files, lines, before = found.get(room, (0, 0, 0))
            found[room] = files + 1, lines + self.texts[name].count("\n"), before + self.statements(name)
        return found

    def statements(self, name: str) -> int:
        """Statements of a file without imports and docstrings."""
        return sum(isinstance(node, ast.stmt) and not _is_uncounted(node) for node in ast.walk(self.trees[name]))

    @functools.cached_property
    def imports(self) -> Graph:
        """Module of kit → modules of kit that it imports: at its top, inside functions, and for types alone."""
        return {name: set(self._imported(name, tree)) - {name} for name, tree in self.kit.items()}

    def _imported(self, name: str, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.kit)
            elif isinstance(node, ast.ImportFrom):
                parents = name.split(".") if self._is_package(name) else name.split(".")[:-1]
                base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
                module = ".".join(filter(None, [base, node.module]))
                for alias in node.names:
                    full = f"{module}.{alias.name}"
                    if full in self.kit or module in self.kit:
                        yield full if full in self.kit else module

    def _is_package(self, name: str) -> bool:
        return f"{name.replace('.', '/')}/__init__.py" in self.trees

    def crossings(self) -> list[str]:
        """Imports between tests and benchmarks beside tests.support, which both may use: file, module."""
        found = []
        for name, tree in self.trees.items():
            room = name.split("/")[0]
            for module in _modules(tree) if room in ("tests", "benchmarks") else ():
                other = module.split(".")[0] == {"tests": "benchmarks", "benchmarks": "tests"}[room]
                if other and not module.startswith("tests.support"):
                    found.append(f"{name}: {module}")
        return found

    def of_a_worker(self, start: str = "kit.training.__main__") -> set[str]:
        """Modules of kit that a process has imported before it joins others: at their top, directly or not."""
        found: set[str] = set()
        left = [start]
        while left:
            if (name := left.pop()) in found:
                continue
            found.add(name)
            tree = self.kit.get(name) or ast.Module([], [])
            top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
            left += [*self._imported(name, ast.Module(top, [])), *filter(None, [name.rpartition(".")[0]])]
        return found

    def module_circles(self) -> list[list[str]]:
        """Sets of modules that import each other, directly or not."""
        return _circles(self.imports)

    def package_circles(self) -> list[list[str]]:
        """Finds import circles between packages: between the packages of kit, then between folders. A file beside
        folders counts as a folder."""
        return [*_circles(self._merged(self._room)), *_circles(self._merged(self._folder))]

    def _merged(self, node: Callable[[str], str]) -> Graph:
        graph: Graph = defaultdict(set)
        for name, imported in self.imports.items():
            graph[node(name)] |= {node(other) for other in imported} - {node(name)}
        return graph

    def _room(self, name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:2]) if self._is_package(".".join(parts[:2])) else name

    def _folder(self, name: str) -> str:
        folder = name if self._is_package(name) else name.rpartition(".")[0]
        has_folders = any(
            other != folder and other.startswith(f"{folder}.") for other in self.kit if self._is_package(other)
        )
        return name if has_folders else folder

    def names_twice(self) -> list[str]:
        """Public functions, classes and constants that several files of a room define, exceptions aside."""
        places: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, tree in self.kit.items():
            words = name.split(".")
            room = "/".join(words[:-1] if words[1:2] == ["addons"] else words[:2])  # an add-on has rooms of its own
            for public in set(_public_names(tree)):
                places[room, public].append(name)
        several = {key: files for key, files in places.items() if len(files) > 1 and key not in TWICE_ALLOWED}
        return [f"{room}: {public} in {', '.join(sorted(files))}" for (room, public), files in sorted(several.items())]

    def quadruples(self) -> list[str]:
        """Functions of kit with parameters model, cluster, job and layout together."""
        return [
            f"{module}.{node.name}"
            for module, tree in self.kit.items()
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)} >= QUADRUPLE
        ]

    def rooms(self) -> dict[str, list[str]]:
        """Package of kit → its modules and packages."""
        found: dict[str, list[str]] = defaultdict(list)
        for path in map(Path, self.trees):
            place = path.parent if path.name == "__init__.py" else path
            if place.parts[0] == "kit" and len(place.parts) > 1:
                found[place.parent.as_posix()].append(place.stem)
        return found

    def durable_writes(self) -> list[str]:
        """Calls in kit that rename, flush to the disk or lock, outside of the file that is for it."""
        return [
            f"{name}:{node.lineno}"
            for name, tree in self.trees.items()
            if name.startswith("kit/") and name != "kit/files.py"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and re.fullmatch(r"os\.replace|.*\.(?:rename|fsync|f?lockf?)", ast.unparse(node.func))
        ]

    def trainings(self) -> list[str]:
        """Calls in tests that train a tiny model by kit's loop (tests/training/runs.py)."""
        return [
            f"{name}:{node.lineno}"
            for name, tree in self.trees.items()
            if re.search(r"^ *from tests\.training import .*\bruns\b", self.texts[name], re.M)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in TRAINS and ast.unparse(node.value) == "runs"
        ]

    def floors(self, package: str = "kit.cost") -> int:
        """Files on the longest path of imports inside a package; 0 where they go in a circle."""
        graph = {name: edges for name, edges in self.imports.items() if name.startswith(f"{package}.")}
        graph = {name: edges & graph.keys() for name, edges in graph.items()}
        if _circles(graph):
            return 0

        @functools.cache
        def height(name: str) -> int:
            return 1 + max(map(height, graph[name]), default=0)

        return max(map(height, graph), default=0)

    def typed_share(self) -> float:
        """Statements of kit under ``mypy --strict``, by pyproject.toml, over all."""
        settings = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
        strict = settings.get("packages", settings.get("files", [])) if settings.get("strict") else []
        patterns = [word.replace("/", ".") for word in ([strict] if isinstance(strict, str) else strict)]
        loose = [
            word.removesuffix(".*")
            for rule in settings.get("overrides", [])
            if rule.get("ignore_errors") or rule.get("disallow_untyped_defs") is False
            for word in ([rule["module"]] if isinstance(rule["module"], str) else rule["module"])
        ]
        sizes = {name: sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) for name, tree in self.kit.items()}
        single = settings.get("modules", [])
        covered = [name for name in sizes if (_inside(name, patterns) or name in single) and not _inside(name, loose)]
        return sum(sizes[name] for name in covered) / sum(sizes.values())

    def walk(self, *arguments: str) -> dict[str, int]:
        """``kit`` with these arguments in a process of its own: files of kit whose functions are called, beside what
        imports run; how often the first call into a file goes back into a package that was left; the deepest stack."""
        command = [sys.executable, __file__, "--walk", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=True)
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found


def _modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(name: str) -> str:
    return name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _inside(name: str, packages: list[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_uncounted(node: ast.AST) -> bool:
    """Imports and docstrings."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _public_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
        else:
            targets = getattr(node, "targets", []) or [getattr(node, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if not name.startswith("_"))


def _circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected sets of more than one node."""

    @functools.cache
    def reached(start: str) -> frozenset[str]:
        seen: set[str] = set()
        ahead = list(graph.get(start, ()))
        while ahead:
            if (node := ahead.pop()) not in seen:
                seen.add(node)
                ahead += graph.get(node, ())
        return frozenset(seen)

    found = {tuple(sorted(node for node in reached(start) if start in reached(node))) for start in graph}
    return [list(circle) for circle in sorted(found) if len(circle) > 1]


def _walk(arguments: list[str]) -> int:
    """Runs inside of the checkout that is measured; its last line is the result."""
    from kit.cli import main

    inside = str(Path("kit").resolve()) + os.sep
    entered: dict[str, None] = {}
    depth = deepest = calls = importing = 0

    def profile(frame: object, event: str, _: object) -> None:
        nonlocal depth, deepest, calls, importing
        code = frame.f_code  # type: ignore[attr-defined]
        if event in ("call", "return") and code.co_name == "<module>":
            importing += 1 if event == "call" else -1
        if event not in ("call", "return") or importing or not code.co_filename.startswith(inside):
            return
        if event == "return":
            depth -= 1
            return
        depth, calls = depth + 1, calls + 1
        deepest = max(deepest, depth)
        entered.setdefault(code.co_filename.removeprefix(inside))

    sys.argv = ["kit", *arguments]
    sys.setprofile(profile)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    packages = [name.split("/")[0] for name in entered if "/" in name]
    turns = [name for name, _ in itertools.groupby(packages)]
    found = {"files": len(entered), "returns": len(turns) - len({*turns}), "deepest": deepest, "calls": calls}
    print("\n" + json.dumps(found))
    return 0


def report(root: Path) -> dict[str, str]:
    """Measure → what it is in a checkout."""
    checkout = Checkout(root)
    sizes = checkout.sizes()
    rows = {f"{room}: files, lines, statements": "{}, {:,}, {:,}".format(*size) for room, size in sorted(sizes.items())}
    for part in ("kit", "kit/addons", "tests", "benchmarks"):
        chosen = [size for room, size in sizes.items() if room.startswith(f"{part}/")]
        rows[f"**{part}**"] = "{}, {:,}, {:,}".format(*map(sum, zip(*chosen, strict=True)))
    with tempfile.TemporaryDirectory(prefix="kit-measure-") as scratch:
        walks = {
            "kit plan llama-3.1-8b --gpus 8xH100": ("plan", "llama-3.1-8b", "--gpus", "8xH100"),
            f"kit emit {RECIPE}": ("emit", f"recipes/{RECIPE}.yaml", "--out", f"{scratch}/run"),
        }
        for name, arguments in walks.items():
            found = checkout.walk(*arguments)
            rows[f"{name}: files entered, returns, deepest stack, calls"] = (
                "{files}, {returns}, {deepest}, {calls:,}".format(**found)
            )
    in_cost = [name for name in checkout.kit if name.startswith("kit.cost.") or name == "kit.cost"]
    return rows | {
        "import circles of modules": _count(checkout.module_circles()),
        "import circles of packages": _count(checkout.package_circles()),
        "public names twice in a package": str(len(checkout.names_twice())),
        "functions with model, cluster, job, layout": str(len(checkout.quadruples())),
        "files of kit/cost, floors": f"{len(in_cost)}, {checkout.floors() or 'in a circle'}",
        "modules of kit that a worker imports": str(len(checkout.of_a_worker())),
        "imports between tests and benchmarks": str(len(checkout.crossings())),
        "kit under mypy --strict": f"{checkout.typed_share():.0%}",
    }


def _count(circles: list[list[str]]) -> str:
    return f"{len(circles)}" + (f" ({'; '.join(' ↔ '.join(circle) for circle in circles)})" if circles else "")


def main(arguments: list[str]) -> int:
    """Print a table with a column for each checkout."""
    if arguments[:1] == ["--walk"]:
        return _walk(arguments[1:])
    if arguments[:1] == ["--list"]:
        checkout = Checkout(Path(*arguments[1:]).resolve())
        print("\n".join([*checkout.names_twice(), *checkout.quadruples()]))
        return 0
    roots = [Path(word).resolve() for word in arguments] or [ROOT]
    columns = [report(root) for root in roots]
    print(f"| | {' | '.join(arguments or ['here'])} |\n|{'---|' * (len(columns) + 1)}")
    for name in dict.fromkeys(name for column in columns for name in column):
        print(f"| {name} | {' | '.join(column.get(name, '–') for column in columns)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
