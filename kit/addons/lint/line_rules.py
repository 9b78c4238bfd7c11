"""Traps of the shell in a launch: a line that ends too early, arguments in the wrong place, a variable that nothing
sets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from kit.addons.lint.commands import Command, known_options, number_of, plain_name, said
from kit.addons.lint.finding import Finding, Severity
from kit.addons.lint.known_keys import near, trainer_arguments
from kit.addons.lint.rule import Case, Each, Rule, check, table
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
    for before, line in itertools.pairwise(shell_lines(text)):
        first = said(line, text)[0]
        if first.startswith("--") and (last := launches.get(number_of(before, text))) is not None:
            number = number_of(line, text)
            blank = re.search(r"\\[ \t]+$", raw[number - 2]) if number > 1 else None
            why = f"{first[:60]} is a command of its own here: the launch ends before it"
            fix = "remove the blank behind the backslash above" if blank else "end the line above with a backslash"
            yield Finding("broken-line", "error", last.file, number, "", why, fix)


def _known(command: Command) -> dict[str, bool]:
    """Option → whether a word follows it, of the launcher and of the Trainer."""
    options = {plain_name(name): words > 0 for name, words in known_options().get(command.launcher, {}).items()}
    return {name: not isinstance(value, bool) for name, value in trainer_arguments().defaults.items()} | options


def _differing(command: Command) -> Iterator[tuple[str, str, str]]:
    """(option, value, another value) of what is given twice. argparse keeps the last value."""
    for pairs in (command.options, command.arguments):
        values: dict[str, str] = {}
        for option, value in pairs:
            first = values.setdefault(plain_name(option), value) if value is not None else None
            if value is not None and first is not None and first != value:
                yield option, first[:60], value[:60]


table(
    "launch",
    {
        # A parser of one's own may collect the values, which is a note.
        Rule(
            "given-twice", "script", "an option twice with two values", "the last one wins, unless a script wraps it"
        ): (
            Each(
                lambda c, twice: "warning" if plain_name(twice[0]) in _known(c) else "note",
                lambda c, twice: twice[0],
                _differing,
                lambda c, twice: f"given as {twice[1]} and as {twice[2]}: the last one counts",
                "keep one",
            ),
        ),
        # What the script's caller adds is one word or many, and stands where $@ does.
        Rule(
            "all-arguments", "script", "`$@` where it takes or gives away options", "arguments reach the wrong program"
        ): (
            Each(
                "warning",
                lambda c, option: option,
                lambda c: [option for option in _ALL.findall(c.text) if _known(c).get(plain_name(option))],
                "takes the first of the words in $@ as its value",
                "give it a value, and put $@ last",
            ),
            Case(
                "warning",
                "",
                lambda c: c.program in ("$@", "$*") and c.words,
                lambda c: (
                    f"$@ stands before the program: {c.launcher} takes the options in it, and stops at the program's"
                ),
                "put it behind the program",
            ),
        ),
    },
)


@check(
    None,
    Rule("unset-variable", "script", "a size in a variable that the script does not set", "empty, or 0 in arithmetic"),
)
def unset_variables(text: str, found: Sequence[Command], given: Sequence[str] = ()) -> Iterator[Finding]:
    """``given``: variables that the job sets. The environment may have others, which is a note."""
    if re.search(r"(?m)^[ \t]*(?:source|\.)[ \t]", text):
        return  # another file may set them
    known = {*_SET.findall(text), *re.findall(r"\w+", " ".join(_SET_TOO.findall(text))), *given}
    asked = (
        (command, option, name, value.startswith("$(("))
        for command in found
        for option, value in _SIZE.findall(command.text)
        for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", value))
    )
    for command, option, name, arithmetic in asked:
        if name not in known and not _GIVEN.match(name):
            meant = near(name, known)
            severity: Severity = "warning" if meant else "note"
            why = f"{name} is set nowhere here, and is {'0' if arithmetic else 'empty'} unless the environment has it"
            fix = f"did you mean {meant}?" if meant else f"set it, or write ${{{name}:?}} to stop without it"
            yield command.finding("unset-variable", severity, option, why, fix)
