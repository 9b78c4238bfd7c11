"""Every ``kit …`` command of a page is one that the command line takes: parsed, not run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kit.cli import app
from kit.errors import KitError

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "recipes" / "README.md", *sorted((ROOT / "runs").glob("*.sh"))]


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """(command, whether it is whole): lines of code blocks and scripts, then code inside of sentences."""
    fenced = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}.*$", fenced.sub("", text), re.MULTILINE)
    code = text if text.startswith("#!") else "\n".join([*fenced.findall(text), *indented])
    for line in re.findall(r"^(?:\$ | *)(?:python -m )?(kit [a-z-].*)$", code.replace("\\\n", " "), re.MULTILINE):
        for part in re.split(r"\s(?:&&|\|\|?|;|2?>+)\s?", line):
            if part.startswith("kit "):
                yield part, True
    for span in re.findall(r"`(kit [^`]+)`", fenced.sub("", text)):
        yield " ".join(span.split()), False


def parse(words: list[str]) -> Any:
    """The command that would run. Raises what the command line would say."""
    command: Any = typer.main.get_command(app)
    context = None
    while True:
        group = hasattr(command, "get_command")
        context = command.make_context(command.name, words, parent=context)
        if not group:
            return command
        words = [*context._protected_args, *context.args]
        command = command.get_command(context, words[0])
        if command is None:
            raise KitError(f"{words[0]} is not a command")
        words = words[1:]


def refusal(command: str, whole: bool) -> str:
    """What the command line says of it; empty where it takes it."""
    if "…" in command or "[" in command:
        command, whole = re.split(r"[…\[]", command)[0], False
    command = re.sub(r"\$\([^)]*\)|\$\w+", "1", command)
    words = [re.sub(r"^[A-Z_]+$", "1", word) for word in shlex.split(command, comments=True)[1:]]
    if words == ["--install-completion"]:
        return ""  # acts while it is parsed
    try:
        parse(words)
    except (KitError, KeyError) as error:
        return str(error)
    except SystemExit:
        return ""
    except Exception as error:
        unfinished = ("MissingParameter", "BadOptionUsage")  # a sentence may name an option without its value
        if type(error).__name__ in ("Exit", "NoArgsIsHelpError", *(() if whole else unfinished)):
            return ""
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_file()], ids=lambda page: page.name)
def test_every_command_is_one(page: Path) -> None:
    found = list(commands(page.read_text(encoding="utf-8")))
    assert {command: said for command, whole in found if (said := refusal(command, whole))} == {}
    assert len(found) >= {"README.md": 8, "training.md": 8}.get(page.name, 0)


@pytest.mark.parametrize(
    ("command", "whole", "refused"),
    [
        ("kit plan llama-3.1-8b --gpu 8xH100", True, True),
        ("kit plann llama-3.1-8b", True, True),
        ("kit memory llama-3.1-8b --zero 3", True, True),
        ("kit train runs/a --stop-at-step soon", True, True),
        ("kit emit recipe.yaml --out runs/a", True, False),
        ("kit convert model", True, True),
        ("kit convert model", False, False),
    ],
)
def test_a_wrong_command_is_noticed(command: str, whole: bool, refused: bool) -> None:
    assert bool(refusal(command, whole)) == refused


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        targets = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8"))
        assert [t for t in targets if not (page.parent / t).exists()] == [], page.name


def test_every_make_target_exists() -> None:
    makefile, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "README.md"))
    assert {*re.findall(r"make ([a-z-]+)", readme)} <= {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)}
