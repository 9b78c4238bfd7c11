"""Draws the rows of ``tool.yaml``: single edits that a syntax tree allows, in the bodies of functions.

    python -m benchmarks.system_tests.mutants.draw --seed 18    the rows of a seed, as YAML

Kinds: a comparison, an operator, a number, a flag, ``max`` for ``min``, a condition or a filter that is dropped, one
branch for both, a statement or an entry or an argument that is left out, two arguments swapped. Of each function one
edit, so that rows do not lean on one test. The same seed and source give the same rows.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from benchmarks import program
from benchmarks.page import ROOT

PACKAGES = {
    "kit/cost": (34, "tests/planning tests/accuracy tests/emit tests/specs tests/diagnose"),
    "kit/planner/rules": (22, "tests/planning tests/emit tests/diagnose"),
    "kit/emit": (22, "tests/emit tests/planning/test_accepted.py tests/planning tests/diagnose"),
    "kit/diagnose": (26, "tests/diagnose tests/emit tests/planning"),
}
"""How many rows, and tests that run the package's code, the likeliest first."""
_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/"}
_NAMES = {"max": "min", "min": "max", "any": "all", "all": "any"}
_WORDS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign)
"""What people read, and types: no place for an edit that matters."""


class _Edit(NamedTuple):
    kind: str
    start: int
    end: int
    """Offsets of what is replaced."""
    text: str


class _Source:
    """One file, and positions of its nodes."""

    def __init__(self, path: Path) -> None:
        self.file, self.text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        self._lines = self.text.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]

    def at(self, node: Any, end: bool = False) -> int:
        """Offset of a node's start or end in the text."""
        line: int = node.end_lineno if end else node.lineno
        column: int = node.end_col_offset if end else node.col_offset
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def of(self, node: ast.AST) -> str:
        return self.text[self.at(node) : self.at(node, end=True)]

    def edit(self, kind: str, node: ast.AST, text: str, to: ast.AST | None = None) -> _Edit:
        """The node's text, or all from its start to the start of ``to``, gives way to ``text``."""
        return _Edit(kind, self.at(node), self.at(to) if to else self.at(node, end=True), text)

    def operator(self, kind: str, left: ast.AST, right: ast.AST, text: str) -> _Edit:
        """What stands between two operands, parentheses and spaces aside."""
        start = self.at(left, end=True)
        found = re.search(r"not\s+in|is\s+not|[a-z]+|[<>=!+*/-]+", self.text[start : self.at(right)])
        assert found, self.file
        return _Edit(kind, start + found.start(), start + found.end(), text)

    def row(self, edit: _Edit) -> dict[str, str] | None:
        """Whole lines before and after, as many as make the old text the only one of its kind."""
        stop = self.text.index("\n", edit.end)
        first = bisect.bisect_right(self._starts, edit.start) - 1
        for line in range(first, max(-1, first - 9), -1):
            old = self.text[self._starts[line] : stop].lstrip()
            begin = stop - len(old)
            if self.text.count(old) == 1:
                new = self.text[begin : edit.start] + edit.text + self.text[edit.end : stop]
                return {"file": self.file, "old": old, "new": new, "met": f"{edit.kind}, by a tool"}
        return None


def _edits(source: _Source, node: ast.AST) -> Iterator[_Edit]:
    """All edits inside a function's body."""
    if isinstance(node, _WORDS):
        return
    yield from _of_node(source, node)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.arguments)):
            yield from _edits(source, child)


def _of_node(source: _Source, node: ast.AST) -> Iterator[_Edit]:
    of, edit = source.of, source.edit
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            yield source.operator("comparison", left, right, _COMPARED[type(op)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            yield source.operator("operator", left, right, _OPERATORS[type(op)])
        case ast.BoolOp(op=op, values=values):
            yield from (edit("condition dropped", value, str(isinstance(op, ast.And))) for value in values)
        case ast.Constant(value=bool() as flag):
            yield edit("flag", node, str(not flag))
        case ast.Constant(value=int() as number):
            yield edit("number", node, str(number + 1))
        case ast.Constant(value=float() as number):
            yield edit("number", node, str(2 * number))
        case ast.UnaryOp(op=ast.Not()):
            yield _Edit("negation", source.at(node), source.at(node) + len("not"), "")
        case ast.IfExp(test=test):
            yield from (edit("one branch", test, str(always)) for always in (False, True))
        case ast.If(test=test, orelse=[]):
            yield edit("condition never", test, "False")
            yield edit("condition always", test, "True")
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield edit("statement left out", node, "pass")
        case ast.comprehension(ifs=[only]):
            yield edit("filter dropped", only, "True")
        case ast.Dict(keys=[*_, ast.AST() as key], values=[*_, value]):
            yield _Edit("entry left out", source.at(key), source.at(value, end=True), "**{}")
        case ast.Call(func=func, args=args, keywords=keywords):
            if of(func) in _NAMES:
                yield edit("largest for smallest", func, _NAMES[of(func)])
            if len(args) == 2 and of(func) not in dir(builtins):
                yield _Edit(
                    "arguments swapped", source.at(args[0]), source.at(args[1], True), f"{of(args[1])}, {of(args[0])}"
                )
            for keyword, following in itertools.pairwise(keywords):
                if keyword.arg not in (None, "strict"):
                    yield edit("argument left out", keyword, "", following)


def drawn(package: str, rng: random.Random) -> Iterator[dict[str, str]]:
    """Rows without end's order: kinds in turn, one edit a function."""
    by_kind: dict[str, list[tuple[_Source, str, _Edit]]] = defaultdict(list)
    for path in sorted((ROOT / package).rglob("*.py")):
        source = _Source(path)
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, ast.FunctionDef):
                for statement in node.body:
                    for edit in _edits(source, statement):
                        by_kind[edit.kind].append((source, f"{path.stem}.{node.name}", edit))
    seen: set[tuple[str, str]] = set()
    for edits in by_kind.values():
        rng.shuffle(edits)
    while any(by_kind.values()):
        for edits in filter(None, by_kind.values()):
            source, function, edit = edits.pop()
            row = source.row(edit) if (source.file, function) not in seen else None
            if row is not None and row["old"] != row["new"]:
                seen.add((source.file, function))
                name = (
                    f"{function} {edit.kind}".replace("__", "").replace("._", ".").replace("_", "-").replace(" ", "-")
                )
                yield {"name": name, **row}


def main(seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 18) -> int:
    """Print the rows."""
    rng = random.Random(seed)
    rows = [
        {**row, "tests": tests}
        for package, (count, tests) in PACKAGES.items()
        for row in itertools.islice(drawn(package, rng), count)
    ]
    print(yaml.safe_dump(rows, sort_keys=False, allow_unicode=True, width=120), end="")
    return 0


if __name__ == "__main__":
    program.run(main)
