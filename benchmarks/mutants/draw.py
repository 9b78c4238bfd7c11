"""Draws single bugs that a syntax tree allows, in the bodies of kit's functions.

The kinds are those that a colleague makes: a comparison, an operator, a number, a flag, ``max`` for ``min``, the first
for the last, a floor for a ceiling, one parallel size for another, the wrong key, a condition or filter that is
dropped, one branch for both, a statement, an entry or an argument that is left out. Of each function at most one bug is
drawn, kinds in turn, so that rare kinds are seen too. The same seed and source give the same bugs.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.page import ROOT

_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/"}
_OTHER_FUNCTION = {"max": "min", "min": "max", "any": "all", "all": "any", "sorted": "list"}
_OTHER_SIZE = {
    "dp": "tp", "tp": "cp", "pp": "vp", "cp": "dp", "ep": "tp", "etp": "tp", "rank": "local_rank",
    "dp_rank": "rank", "micro_batch_size": "global_batch_size", "exp_avg": "exp_avg_sq", "EXP_AVG": "EXP_AVG_SQ",
}  # fmt: skip
"""Attribute → another of its kind."""
_WORDS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign)
"""What people read, and types: no place for a bug that matters."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    kind: str
    file: str
    """Path in the repository."""
    function: str
    line: int
    last_line: int
    """Of the statement that begins on or before ``line``, its body aside."""
    start: int
    end: int
    """Characters of the file that are replaced."""
    old: str
    new: str

    @property
    def package(self) -> str:
        """``kit/engines``, ``kit/cost``, …"""
        return "/".join(self.file.split("/")[:2])

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.kind}: {self.old!r} → {self.new!r}"

    def plant(self, tree: Path) -> None:
        """Change the file in a copy of the source from which the bug was drawn."""
        text = (tree / self.file).read_text(encoding="utf-8")
        assert text[self.start : self.end] == self.old, self
        (tree / self.file).write_text(text[: self.start] + self.new + text[self.end :], encoding="utf-8")


class _Source:
    """One file, and the offsets of its nodes."""

    def __init__(self, file: str) -> None:
        self.file, self.text = file, (ROOT / file).read_text(encoding="utf-8")
        self._lines = self.text.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]
        self.function, self._last_line = "", 0

    def at(self, node: Any, end: bool = False) -> int:
        """Offset of a node's start or end; Python counts columns in bytes."""
        line: int = node.end_lineno if end else node.lineno
        column: int = node.end_col_offset if end else node.col_offset
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def of(self, node: ast.AST) -> str:
        return self.text[self.at(node) : self.at(node, end=True)]

    def change(self, kind: str, start: int, end: int, new: str) -> Mutant:
        line = self.text.count("\n", 0, start) + 1
        last = max(line, self._last_line)
        return Mutant(kind, self.file, self.function, line, last, start, end, self.text[start:end], new)

    def node(self, kind: str, node: ast.AST, new: str) -> Mutant:
        return self.change(kind, self.at(node), self.at(node, end=True), new)

    def operator(self, kind: str, left: ast.AST, right: ast.AST, new: str) -> Mutant:
        """What stands between two operands, parentheses and spaces aside."""
        start = self.at(left, end=True)
        found = re.search(r"not\s+in|is\s+not|[a-z]+|[<>=!+*/-]+", self.text[start : self.at(right)])
        assert found, self.file
        return self.change(kind, start + found.start(), start + found.end(), new)

    def mutants(self) -> Iterator[Mutant]:
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.FunctionDef):
                self.function = node.name
                for statement in node.body:
                    yield from self._inside(statement)

    def _inside(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, _WORDS):
            return
        if isinstance(node, ast.stmt):
            body: list[ast.stmt] = getattr(node, "body", [])
            self._last_line = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        yield from self._of_node(node)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.arguments)):
                yield from self._inside(child)

    def _of_node(self, node: ast.AST) -> Iterator[Mutant]:
        of, change = self.of, self.node
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                yield self.operator("comparison", left, right, _COMPARED[type(op)])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                yield self.operator("operator", left, right, _OPERATORS[type(op)])
            case ast.BoolOp(op=op, values=values):
                yield from (change("condition dropped", value, str(isinstance(op, ast.And))) for value in values)
            case ast.Constant(value=bool() as flag):
                yield change("flag", node, str(not flag))
            case ast.Constant(value=int() as number):
                yield change("number", node, str(number + 1))
            case ast.Constant(value=float() as number):
                yield change("number", node, str(2 * number))
            case ast.UnaryOp(
                op=ast.USub(), operand=ast.BinOp(left=ast.UnaryOp(op=ast.USub()) as top, op=ast.FloorDiv())
            ):
                yield self.change("floor for ceiling", self.at(node), self.at(top.operand), "(")
            case ast.UnaryOp(op=ast.Not()):
                yield self.change("negation", self.at(node), self.at(node) + len("not"), "")
            case ast.IfExp(test=test):
                yield from (change("one branch", test, str(always)) for always in (False, True))
            case ast.If(test=test, orelse=[]):
                yield change("condition never", test, "False")
                yield change("condition always", test, "True")
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield change("statement left out", node, "pass")
            case ast.comprehension(ifs=[only]):
                yield change("filter dropped", only, "True")
            case ast.Subscript(slice=ast.Constant(value=0) as first):
                yield change("last for first", first, "-1")
            case ast.Attribute(attr=attr, value=value) if attr in _OTHER_SIZE:
                yield self.change(
                    "another size", self.at(value, end=True), self.at(node, end=True), f".{_OTHER_SIZE[attr]}"
                )
            case ast.Dict(keys=[*_, ast.AST() as key], values=[*_, value]):
                yield self.change("entry left out", self.at(key), self.at(value, end=True), "**{}")
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield change("wrong key", key, repr(key.value + "s"))
            case ast.Call(func=func, keywords=keywords):
                if of(func) in _OTHER_FUNCTION:
                    yield change("another function", func, _OTHER_FUNCTION[of(func)])
                for keyword, following in itertools.pairwise(keywords):
                    if keyword.arg not in (None, "check", "encoding", "strict"):  # whose defaults are as good here
                        yield self.change("argument left out", self.at(keyword), self.at(following), "")


def drawn(files: Iterable[str], rng: random.Random, lines: dict[str, set[int]] | None = None) -> Iterator[Mutant]:
    """Bugs of these files in a random order; with ``lines`` only there."""
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for file in sorted(files):
        for mutant in _Source(file).mutants():
            if lines is None or mutant.line in lines.get(file, ()):
                by_kind[mutant.kind].append(mutant)
    for kind in sorted(by_kind):
        rng.shuffle(by_kind[kind])
    kinds = sorted(by_kind)
    rng.shuffle(kinds)
    seen: set[tuple[str, str]] = set()
    while any(by_kind.values()):
        for kind in kinds:
            while by_kind[kind]:
                mutant = by_kind[kind].pop()
                if (mutant.file, mutant.function) not in seen and mutant.old != mutant.new:
                    seen.add((mutant.file, mutant.function))
                    yield mutant
                    break
