"""Command lines of launchers in a shell script: which launcher, its options, the program and the program's options."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from kit.addons.lint.finding import Changes, Finding, Severity
from kit.addons.lint.job import Job
from kit.addons.lint.known_keys import generated
from kit.addons.lint.shell_words import Line, shell_lines


@dataclass(frozen=True)
class Launcher:
    """A program that starts processes; its options are in launcher_options.yaml."""

    name: str
    forms: tuple[tuple[str, ...], ...]
    """Command prefixes of a launch; the first word may be a path."""
    processes: str
    """The option that sets the number of processes."""
    per_node: bool
    """Whether ``processes`` is per node; else it is for all nodes."""
    abbreviates: bool
    """Whether unique prefixes of options are accepted (argparse, allow_abbrev)."""


LAUNCHERS = (
    Launcher(
        "torchrun",
        (("torchrun",), ("-m", "torch.distributed.run"), ("-m", "torch.distributed.launch")),
        "nproc_per_node",
        per_node=True,
        abbreviates=True,
    ),
    Launcher(
        "deepspeed",
        (("deepspeed",), ("-m", "deepspeed.launcher.runner")),
        "num_gpus",
        per_node=True,
        abbreviates=True,
    ),
    Launcher(
        "accelerate launch",
        (("accelerate", "launch"), ("-m", "accelerate.commands.launch")),
        "num_processes",
        per_node=False,
        abbreviates=False,
    ),
)
_TALKED_OF = {"install", "uninstall", "echo", "printf", "which", "show", "clone", "command"}
"""After these words a launcher's name is only an argument."""
_NO_TRAINING = {"pip", "venv", "ensurepip", "http.server", "json.tool", "pytest"}
"""Modules that python -m runs beside a training."""
_TASK_STARTERS = {"srun", "mpirun", "mpiexec", "jsrun", "aprun", "flux", "ibrun", "parallel", "xargs"}
_HOST_STARTERS = {"ssh", "pdsh", "clush", "parallel-ssh", "pssh", "dsh"}
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*$")
_VARIABLE = re.compile(r"\$[{(@*\w]")
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Command:
    """One launch."""

    launcher: str
    """Name of the launcher; ``python`` if the program starts without one."""
    file: str
    """The script's name."""
    line: int
    former: bool
    """Started by ``torch.distributed.launch``."""
    options: tuple[tuple[str, str | None], ...]
    """(option, value) pairs of the launcher, in order, abbreviated or not; the value of a switch is None."""
    program: str
    """The script or module; empty if there is none."""
    words: tuple[str, ...]
    """The words after the program."""
    opaque: bool = False
    """Whether a launcher's line has a shell variable of unknown value, which may contain options that seem to be
    missing."""
    starter: str = ""
    """What starts the line as several tasks (srun, mpirun) or on other hosts (ssh, pdsh); empty if nothing does."""
    visible: str = ""
    """CUDA_VISIBLE_DEVICES as set on the same line or by an export above; empty if not set."""
    threads: bool = False
    """Whether OMP_NUM_THREADS is set on the same line, above it or by the job, or may be by a file that is read."""
    job: Job = field(default_factory=Job)
    text: str = ""
    """The line, with its variables."""

    @property
    def open_ended(self) -> bool:
        """Whether a variable may hold options of the launcher: where the program should be, one may hold both."""
        return self.program.startswith("$") or not self.program

    def says_all(self, switches: Container[str] = ()) -> bool:
        """Whether no variable can hold further options of the program. ``switches``: options without a value."""
        for before, word in zip((self.program, *self.words), self.words, strict=False):
            is_value = before.startswith("--") and "=" not in before and plain_name(before) not in switches
            if word.startswith("$") and (not is_value or word.startswith(("$@", "$*")) or "[" in word):
                return False
        return True

    @property
    def in_tasks(self) -> bool:
        """Whether it starts in several tasks: one process in each."""
        return self.starter in _TASK_STARTERS or (self.job.tasks_per_node or 1) > 1

    @property
    def everywhere(self) -> bool:
        """Whether something starts it on several nodes, or in several tasks."""
        return bool(self.starter) or self.job.kind == "kubernetes"

    @property
    def arguments(self) -> tuple[tuple[str, str | None], ...]:
        """The program's own options."""
        return tuple(_pairs(self.words))

    @property
    def argument_names(self) -> set[str]:
        """Plain names of the program's own options."""
        return {plain_name(option) for option, _ in self.arguments}

    def value(self, *names: str) -> str | None:
        """Value of the launcher's option by any of its names, ``-`` and ``_`` alike."""
        return _value(self.options, names)

    def argument(self, *names: str) -> str | None:
        """Value of the program's own option, by any of its names."""
        return _value(self.arguments, names)

    def finding(self, rule: str, severity: Severity, key: str, why: str, fix: str, changes: Changes = ()) -> Finding:
        """A finding of this line."""
        return Finding(rule, severity, self.file, self.line, key, why, fix, changes)


@cache
def known_options() -> Mapping[str, Mapping[str, int]]:
    """Launcher → its options → how many words follow; written by scripts/launcher_options.py."""
    return generated("launcher_options.yaml")


def commands(text: str, file: str, job: Job | None = None) -> Iterator[Command]:
    """Every launch in a script, in order. A word whose value is not known is as it is written."""
    job, reads = job or Job.of_batch(text), re.search(r"(?m)^[ \t]*(?:source|\.)[ \t]", text) is not None
    for line in shell_lines(text, written=True):
        words = said(line, text)
        if (found := _command(words, file, line, text)) is not None:
            of_line = (word.partition("=")[2] for word in words if word.startswith("CUDA_VISIBLE_DEVICES="))
            devices = next(of_line, line.variables.get("CUDA_VISIBLE_DEVICES") or "")
            whole = text[line.words[0].start : line.words[-1].end].replace("\\\n", " ")
            known = {*line.variables, *job.variables, *(word.partition("=")[0] for word in words if "=" in word)}
            yield replace(
                found, starter=_starter(words), visible=devices, threads=reads or _THREADS in known, job=job, text=whole
            )


def number_of(line: Line, text: str) -> int:
    """The number of the line of the script where a command begins."""
    return text.count("\n", 0, line.words[0].start) + 1


def said(line: Line, text: str) -> list[str]:
    """The words of a command."""
    written = ((word.value, text[word.start : word.end]) for word in line.words)
    return [source.replace('"', "") if value is None else value for value, source in written]


def _starter(words: Sequence[str]) -> str:
    """The program that starts this line as several tasks, or on other hosts."""
    return next((name for name in map(_name, words) if name in _TASK_STARTERS | _HOST_STARTERS), "")


_OTHERS = {
    "swift",
    "llamafactory-cli",
    "axolotl",
    "trl",
    "tune",
    "xtuner",
    "composer",
    "colossalai",
    "nemo",
    "horovodrun",
}
"""Programs that start training by themselves: the words behind them are theirs."""
_BEFORE = {"exec", "nohup", "time", "env", "uv", "run", "srun", "sudo"}


def _started(line: Line, text: str) -> str:
    """The program that a command starts, behind what only runs it."""
    words = (word for word in said(line, text) if not (word in _BEFORE or "=" in word or word.startswith("-")))
    return _name(next(words, ""))


def unread(text: str, file: str, read: int) -> list[Finding]:
    """What a script starts beside the launches that were read: a warning where none was."""
    severity: Severity = "note" if read else "warning"
    of_others = [(line, name) for line in shell_lines(text) if (name := _started(line, text)) in _OTHERS]
    why, fix = "what {} starts is not read", "name the configuration that it reads"
    found = [
        Finding("not-read", severity, file, number_of(line, text), "", why.format(name), fix)
        for line, name in of_others
    ]
    why = "no line starts torchrun, deepspeed, accelerate launch or a Python script: nothing was read"
    nothing = [] if read else [Finding("not-read", severity, file, None, "", why, "name the script that does")]
    return found or nothing


def plain_name(option: str) -> str:
    """An option's name as argparse keeps it: ``--num-layers`` and ``--num_layers`` are one."""
    return option.lstrip("-").replace("-", "_")


def number(value: str | None) -> int | None:
    """The value of a literal whole number; None for a variable or a range such as ``1:4``."""
    return int(value) if value is not None and value.isdecimal() else None


def _command(words: Sequence[str], file: str, line: Line, text: str) -> Command | None:
    for at in range(len(words)):
        for launcher, form in ((each, form) for each in LAUNCHERS for form in each.forms):
            if _starts(words, at, form):
                rest = words[at + len(form) :]
                options, program, arguments = _split(rest, known_options()[launcher.name], launcher.abbreviates)
                former = form[-1] == "torch.distributed.launch"
                opaque, number = any(_VARIABLE.match(word) for word in rest), number_of(line, text)
                return Command(launcher.name, file, number, former, options, program, tuple(arguments), opaque)
    for at, word in enumerate(words):
        module = word == "-m" and words[at + 1 : at + 2] and words[at + 1] not in _NO_TRAINING
        if (module or word.endswith(".py")) and _python_before(words, at, variables=word == "-m"):
            program, *arguments = words[at + bool(module) :]
            return Command("python", file, number_of(line, text), False, (), program, tuple(arguments))
    return None


def _starts(words: Sequence[str], at: int, form: tuple[str, ...]) -> bool:
    """Whether the words of a launch begin here."""
    if form[0] == "-m":
        return tuple(words[at : at + len(form)]) == form and _python_before(words, at)
    if (_name(words[at]), *words[at + 1 : at + len(form)]) != form or (at and words[at - 1].startswith("-")):
        return False
    return not _TALKED_OF & set(map(_name, words[:at]))


def _name(word: str) -> str:
    """A program's name without its folder."""
    return word.rsplit("/", 1)[-1]


def _python_before(words: Sequence[str], position: int, variables: bool = True) -> bool:
    """Whether the word at ``position`` follows a Python interpreter and its switches (-u), or a module that runs
    another one (``python -m kit.training.interruptible -m …``). ``variables``: a shell variable counts as an
    interpreter."""
    if words[position] == "-m" and position > 1 and words[position - 2] == "-m":
        position -= 2
    while position and words[position - 1].startswith("-"):
        position -= 1
    word = words[position - 1].lstrip("\"'") if position else ""
    return bool(_PYTHON.match(word)) or (variables and word.startswith("$"))


def _split(
    words: Sequence[str], known: Mapping[str, int], abbreviates: bool
) -> tuple[tuple[tuple[str, str | None], ...], str, Sequence[str]]:
    """Splits a launch into the launcher's options, the program, and the program's arguments. The next word is the value
    of an unknown option, unless it is an option or a program."""
    found: list[tuple[str, str | None]] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        name, has_value, value = words[at].partition("=")
        full = [option for option in known if abbreviates and name.startswith("--") and option.startswith(name)]
        name = full[0] if len(full) == 1 else name
        following = "".join(words[at + 1 : at + 2])
        is_value = bool(following) and not following.startswith("-") and not following.endswith(".py")
        takes = 0 if has_value else known.get(name, int(is_value))
        found.append((name, value if has_value else following if takes else None))
        at += 1 + takes
    return tuple(found), "".join(words[at : at + 1]), words[at + 1 :]


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    for word, following in zip(words, (*words[1:], "--"), strict=False):
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            yield name, value if has_value else None if following.startswith("--") else following


def _value(pairs: Sequence[tuple[str, str | None]], names: Sequence[str]) -> str | None:
    wanted = {name.replace("-", "_") for name in names}
    return next((value for name, value in reversed(pairs) if plain_name(name) in wanted), None)
