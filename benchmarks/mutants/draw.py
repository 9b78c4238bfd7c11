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
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT

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
_CONDITIONS = (("condition never", "False"), ("condition always", "True"))
_SIMPLE = (ast.Attribute, ast.Call, ast.Constant, ast.Name, ast.Subscript)
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
    """Bytes of the file that are replaced."""
    old: str
    new: str

    @property
    def package(self) -> str:
        """``kit/engines``, ``kit/cost``, …"""
        return "/".join(self.file.split("/")[:2])

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.kind}: {self.old!r:.80} → {self.new!r:.80}"

    def plant(self, tree: Path) -> None:
        """Change the file in a copy of the source from which the bug was drawn."""
        text = (tree / self.file).read_bytes()
        assert text[self.start : self.end].decode() == self.old, self
        (tree / self.file).write_bytes(text[: self.start] + self.new.encode() + text[self.end :])


def mutants_of(file: str) -> Iterator[Mutant]:
    """Every bug of one file."""
    text = (ROOT / file).read_bytes()
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    for each in functions:
        for node, last_line in itertools.chain(*(_inside(statement, 0) for statement in each.body)):
            for kind, place, new in _changes(node):
                start = starts[place.lineno - 1] + place.col_offset
                end = starts[place.end_lineno - 1] + place.end_col_offset
                old, last = text[start:end].decode(), max(place.lineno, last_line)
                yield Mutant(kind, file, each.name, place.lineno, last, start, end, old, new)


def _inside(node: ast.AST, last_line: int) -> Iterator[tuple[ast.AST, int]]:
    """Nodes of a statement of this function alone, each with the last line of its statement, the body aside."""
    if isinstance(node, (*_WORDS, ast.FunctionDef, ast.ClassDef, ast.arguments)):
        return
    if isinstance(node, ast.stmt):
        body: list[ast.stmt] = getattr(node, "body", [])
        last_line = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    yield node, last_line
    for child in ast.iter_child_nodes(node):
        yield from _inside(child, last_line)


def _changes(node: ast.AST) -> Iterator[tuple[str, Any, str]]:
    """(kind, the node that is replaced, by what)."""

    def of(part: ast.AST) -> str:
        return ast.unparse(part) if isinstance(part, _SIMPLE) else f"({ast.unparse(part)})"

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            yield "comparison", node, f"{of(left)} {_COMPARED[type(op)]} {of(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            yield "operator", node, f"{of(left)} {_OPERATORS[type(op)]} {of(right)}"
        case ast.BoolOp(op=op, values=values):
            yield from (("condition dropped", value, str(isinstance(op, ast.And))) for value in values)
        case ast.Constant(value=bool() as flag):
            yield "flag", node, str(not flag)
        case ast.Constant(value=int() as number):
            yield "number", node, str(number + 1)
        case ast.Constant(value=float() as number):
            yield "number", node, str(2 * number)
        case ast.UnaryOp(
            op=ast.USub(), operand=ast.BinOp(left=ast.UnaryOp(op=ast.USub()) as top, op=ast.FloorDiv(), right=by)
        ):
            yield "floor for ceiling", node, f"({of(top.operand)} // {of(by)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negation", node, of(operand)
        case ast.IfExp(test=test):
            yield from (("one branch", test, str(always)) for always in (False, True))
        case ast.If(test=test, orelse=[]):
            yield from ((kind, test, value) for kind, value in _CONDITIONS)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement left out", node, "pass"
        case ast.comprehension(ifs=[only]):
            yield "filter dropped", only, "True"
        case ast.Subscript(slice=ast.Constant(value=0) as first):
            yield "last for first", first, "-1"
        case ast.Attribute(attr=attr, value=value) if attr in _OTHER_SIZE:
            yield "another size", node, f"{ast.unparse(value)}.{_OTHER_SIZE[attr]}"
        case ast.Dict(keys=[*keys, ast.AST() as key], values=[*values, _]):
            yield "entry left out", node, ast.unparse(ast.Dict(keys, values))
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield "wrong key", key, repr(key.value + "s")
        case ast.Call(func=func, args=given, keywords=keywords):
            if ast.unparse(func) in _OTHER_FUNCTION:
                yield "another function", func, _OTHER_FUNCTION[ast.unparse(func)]
            for keyword in keywords[:-1]:
                if keyword.arg not in (None, "check", "encoding", "strict"):  # whose defaults are as good here
                    others = [other for other in keywords if other is not keyword]
                    yield "argument left out", node, ast.unparse(ast.Call(func, given, others))


def drawn(files: Iterable[str], rng: random.Random, lines: dict[str, set[int]] | None = None) -> Iterator[Mutant]:
    """Bugs of these files in a random order; with ``lines`` only there."""
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for file in sorted(files):
        for mutant in mutants_of(file):
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
