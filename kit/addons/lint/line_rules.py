"""Traps of the shell in a launch: a line that ends too early, arguments in the wrong place, a variable that nothing
sets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from kit.addons.lint.commands import Command, known_options, number_of, plain_name, said
from kit.addons.lint.finding import Finding, Severity
from kit.addons.lint.known_keys import trainer_arguments
from kit.addons.lint.rule import Rule, check
from kit.addons.lint.shell_words import shell_lines

_SIZE = re.compile(
    r"(--[\w-]{0,60}(?:size|nproc|nnodes|num_|rank|steps|length)[\w-]{0,60})[= ]+\"?(\$\(\([^)]{0,200}\)\)|\$\{?\w+\}?)"
)
_ALL = re.compile(r"(--[\w-]{1,60})[ \t]+\"?\$[@*]")
_GIVEN = re.compile(
    r"(?:SLURM|PBS|LSB|OMPI|PMI|PET|KUBERNETES|JOB|SGE|COBALT|FLUX)_\w+|(?:WORLD_SIZE|N?NODES?|\w*RANK)$"
)
"""Variables that a scheduler or a launcher sets."""
_SET = re.compile(r"(?m)^[ \t]*(?:(?:export|local|readonly|declare)(?: -\w+)?[ \t]+)?(\w+)\+?=")
_SET_TOO = re.compile(r"\b(?:read|for|getopts|mapfile|printf -v)\b[^\n;]*|\$\{\w+:?=")


@check(
    None,
    Rule("broken-line", "script", "options on a line of their own, behind a launch", "run as a command, which fails"),
)
def broken_line(text: str, found: Sequence[Command]) -> Iterator[Finding]:
    """A shell ends a command at the end of a line without a backslash, or with a blank behind it."""
    launches = {command.line: command for command in found}
    raw = text.splitlines()
    last: Command | None = None
    for line in shell_lines(text):
        number, first = number_of(line, text), said(line, text)[0]
        if last is not None and first.startswith("--"):
            blank = re.search(r"\\[ \t]+$", raw[number - 2]) if number > 1 else None
            why = f"{first[:60]} is a command of its own here: the launch ends before it"
            fix = "remove the blank behind the backslash above" if blank else "end the line above with a backslash"
            yield Finding("broken-line", "error", last.file, number, "", why, fix)
        last = launches.get(number)


def _known(command: Command) -> dict[str, bool]:
    """Option → whether a word follows it, of the launcher and of the Trainer."""
    options = {plain_name(name): words > 0 for name, words in known_options().get(command.launcher, {}).items()}
    return {name: not isinstance(value, bool) for name, value in trainer_arguments().defaults.items()} | options


@check(
    "launch",
    Rule("given-twice", "script", "an option twice with two values", "the last one wins, unless a script wraps it"),
)
def given_twice(command: Command) -> Iterator[Finding]:
    """argparse keeps the last value. A parser of one's own may collect them, which is a note."""
    for pairs in (command.options, command.arguments):
        values: dict[str, str] = {}
        for option, value in pairs:
            name = plain_name(option)
            if value is not None and values.setdefault(name, value) != value:
                severity: Severity = "warning" if name in _known(command) else "note"
                why = f"given as {values[name][:60]} and as {value[:60]}: the last one counts"
                yield command.finding("given-twice", severity, option, why, "keep one")


@check(
    "launch",
    Rule("all-arguments", "script", "`$@` where it takes or gives away options", "arguments reach the wrong program"),
)
def all_arguments(command: Command) -> Iterator[Finding]:
    """What the script's caller adds is one word or many, and stands where ``$@`` does."""
    for option in _ALL.findall(command.text):
        if _known(command).get(plain_name(option)):
            why = "takes the first of the words in $@ as its value"
            yield command.finding("all-arguments", "warning", option, why, "give it a value, and put $@ last")
    if command.program in ("$@", "$*") and command.words:
        why = f"$@ stands before the program: {command.launcher} takes the options in it, and stops at the program's"
        yield command.finding("all-arguments", "warning", "", why, "put it behind the program")


@check(
    None,
    Rule("unset-variable", "script", "a size in a variable that the script does not set", "empty, or 0 in arithmetic"),
)
def unset_variables(text: str, found: Sequence[Command], given: Sequence[str] = ()) -> Iterator[Finding]:
    """``given``: variables that the job sets. The environment may have others, which is a note."""
    if re.search(r"(?m)^[ \t]*(?:source|\.)[ \t]", text):
        return  # another file may set them
    known = {*_SET.findall(text), *re.findall(r"\w+", " ".join(_SET_TOO.findall(text))), *given}
    for command in found:
        for option, value in _SIZE.findall(command.text):
            arithmetic = value.startswith("$((")
            for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", value)):
                if name in known or _GIVEN.match(name):
                    continue
                near = difflib.get_close_matches(name, known, 1, 0.75)
                severity: Severity = "warning" if near else "note"
                why = (
                    f"{name} is set nowhere here, and is {'0' if arithmetic else 'empty'} unless the environment has it"
                )
                fix = f"did you mean {near[0]}?" if near else f"set it, or write ${{{name}:?}} to stop without it"
                yield command.finding("unset-variable", severity, option, why, fix)
