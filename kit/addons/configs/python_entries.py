"""Python: what a function of a registry returns, followed line by line in its syntax tree. Nothing of the file runs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, cast

from kit.addons.configs.entries import Entry, Source, Unresolved, word
from kit.errors import SpecError

Made = dict[str, Any]
"""What an expression makes: its own value under "", and a call's parts by keyword or place, each made in turn. An
object with two names is one: what changes it is seen under both. Empty: what the file leaves to the program."""
_SIGNS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_MOST_LINES, _MOST_VALUES, _LARGEST = 20_000, 5_000, 1 << 62


def read_python(text: str, name: str) -> Source:
    """The parts of what a function returns; ``command`` is the call that makes it, such as ``Trainer.Config``. ``name``
    ends with the function's, as ``llama3/config_registry.py::llama3_8b``, unless it is the only one without arguments.
    Raises ``SpecError``."""
    name, _, function = name.partition("::")
    try:
        module = _Module(ast.parse(text), name.rpartition("/")[0])
        own = [each for each, node in module.functions.items() if each[0] != "_" and not ast.unparse(node.args)]
        asked = own[0] if not function and len(own) == 1 else function
        if asked not in own:
            raise ValueError(f"name one of its functions, as {name}::{(*own, 'NAME')[0]} does: {', '.join(own)}")
        made = module.followed(module.functions[asked].body, dict(module.known))
        entries = dict(islice(_parts(made), _MOST_VALUES))
        if len(entries) == _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES:,} values")
    except (SyntaxError, ValueError, RecursionError, MemoryError, StopIteration) as error:
        raise SpecError(f"{name}: {' '.join(str(error).split()) or 'too many lines to follow'}") from None
    return Source(name, text, "python", entries, word(entries.pop("", Entry("", 0)).value))


def _parts(made: Made, key: str = "") -> Iterator[tuple[str, Entry]]:
    for name, part in made.items():
        yield from [(key, part)] if isinstance(part, Entry) else _parts(part, f"{key}.{name}".strip("."))


def _unknown(node: Any, written: str = "") -> Made:
    """``written``: a shorter name of the node."""
    return {"": Entry(Unresolved((written or ast.unparse(node)).split("\n")[0][:80]), node.lineno)}


class _Module:
    """A module's functions, and what its names stand for."""

    def __init__(self, tree: ast.Module, folder: str) -> None:
        self.folder, self.origins, self.turns = folder, dict[str, str](), iter(range(_MOST_LINES))
        self.functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        self.known: dict[str, Made] = {}
        self.followed(tree.body, self.known)

    def followed(self, lines: Sequence[ast.stmt], known: dict[str, Made]) -> Made:
        """What the lines return. Of a line that is not followed all that it may change is unknown."""
        for line in lines:
            next(self.turns)
            match line:
                case ast.Return(value=ast.expr() as value):
                    return known.get("return") or self.made(value, known)
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    known[name] = self.made(value, known)
                case ast.Assign(targets=[ast.Attribute(value=holder, attr=name)], value=value):
                    self.made(holder, known)[name] = self.made(value, known) or _unknown(value)
                case ast.ImportFrom():
                    module = f"{self.folder if line.level else ''}.{line.module or ''}".strip(".")
                    self.origins |= {each.asname or each.name: f"{module}.{each.name}" for each in line.names}
                case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call) if name in self.functions:
                    self.made(call, known)
                case ast.FunctionDef() | ast.ClassDef() | ast.Assert():
                    continue
                case _:
                    self.changed(line, known)
        return known.get("return", {})

    def changed(self, line: ast.stmt, known: dict[str, Made]) -> None:
        """Leaves unknown what a line sets, and what it gives to calls."""
        held, unknown = list[Any](), _unknown(line)
        for node in ast.walk(line):
            match node:
                case ast.Return():
                    known["return"] = unknown
                case ast.Call(func=function, args=places, keywords=words):
                    held += [*places, *(word.value for word in words), getattr(function, "value", function)]
                case ast.Subscript(value=holder, ctx=ast.Store() | ast.Del()):
                    held.append(holder)
                case ast.Name(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                    held.append(node)
        for made in [self.made(each, known) for each in held]:
            made.clear()
            made.update(unknown)

    def made(self, node: ast.expr, known: dict[str, Made]) -> Made:
        """What an expression makes; unknown where it is none of those that are followed."""
        match node:
            case ast.Name(id=name) if name in known:
                return known[name]
            case ast.Attribute(value=holder, attr=name):
                return cast(Made, self.made(holder, known).setdefault(name, {}))
            case ast.Call():
                return self.called(node, known)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                parts = [self.made(each, known) or _unknown(each) for each in items]
                values = [part.get("", Entry("...", 0)).value for part in parts]
                own = Unresolved(values) if any(isinstance(each, Unresolved) for each in values) else values
                return {"": Entry(own, node.lineno)} | {str(at): part for at, part in enumerate(parts)}
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
                one, two = (self.made(each, known).get("", Entry("", 0)).value for each in (left, right))
                if type(one) is type(two) is int and max(abs(one), abs(two)) < _LARGEST:
                    return {"": Entry(_SIGNS[type(sign)](one, two), node.lineno)}
        with suppress(ValueError):
            value = ast.literal_eval(node)
            return {"": Entry("none" if value is None else value, node.lineno)}
        return _unknown(node)

    def called(self, node: ast.Call, known: dict[str, Made]) -> Made:
        """What a function of the file returns; of another call its name, with its module's last part, and its parts."""
        places = {str(at): self.made(each, known) for at, each in enumerate(node.args)}
        words = {each.arg or "**": self.made(each.value, known) for each in node.keywords}
        name, on = ast.unparse(node.func), getattr(node.func, "value", None)
        if (function := self.functions.get(name)) is not None:
            names = [each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)]
            given = {each: _unknown(node) for each in names} | dict(zip(names, places.values(), strict=False))
            return self.followed(function.body, self.known | given | words)
        parts = {key: part or _unknown(node) for key, part in (places | words).items()}
        root, dot, rest = name.partition(".")
        full = f"{self.origins.get(root, root)}{dot}{rest}".split(".")
        own = _unknown(node, "" if "**" in words else ".".join(full[-2:]))
        return own | (self.called(on, known) if isinstance(on, ast.Call) else {}) | parts
