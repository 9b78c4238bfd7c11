"""Every ``kit …`` command of a page is one that the command line takes. The pages for users are short and begin with a
command, and their blocks of bash run as they stand in a checkout."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kit.cli import app
from kit.errors import KitError
from kit.training.data.chat_template import read_chat_template
from tests.support import ROOT
from tests.support.assets import prepare
from tests.support.files import file_with, files_in
from tests.support.in_process import kit_main

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "runs").glob("*.sh")),
]  # fmt: skip


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """(command, whether it is whole): lines of code blocks and scripts, then code inside of sentences."""
    fenced = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}.*$", fenced.sub("", text), re.MULTILINE)
    code = text if text.startswith("#!") else "\n".join([*fenced.findall(text), *indented])
    for line in re.findall(r"^(?:\$ | *)(?:python -m )?(kit [a-z-].*)$", code.replace("\\\n", " "), re.MULTILINE):
        yield from ((part, True) for part in re.split(r"\s(?:&&|\|\|?|;|2?>+)\s?", line) if part.startswith("kit "))
    yield from ((" ".join(span.split()), False) for span in re.findall(r"`(kit [^`]+)`", fenced.sub("", text)))


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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.is_file()], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_every_command_is_one(page: Path) -> None:
    found = list(commands(page.read_text(encoding="utf-8")))
    assert {command: said for command, whole in found if (said := refusal(command, whole))} == {}
    assert len(found) >= {"README.md": 8, "training.md": 8}.get(page.name, 0) * (page.parent.name != "notes")


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


USE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"][0]["Use"]
USER_PAGES = {Path(name).stem: ROOT / "docs" / name for name in USE if (ROOT / "docs" / name).is_file()}
WIDTH, SCREEN = 120, 35
"""Of a terminal: columns and lines. A page for users has four screens at most."""
NO_COMMAND = {"glossary"}


def blocks(page: Path) -> list[list[str]]:
    """The commands of kit in each block of bash, without the page of ``kit ui``, which does not end."""
    found = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [re.findall(r"^kit (?!ui).*$", block, re.MULTILINE) for block in found]


@pytest.mark.parametrize("page", USER_PAGES)
def test_a_page_for_users_is_short_and_begins_with_a_command(page: str) -> None:
    lines = re.sub("<!--.*?-->", "", USER_PAGES[page].read_text(encoding="utf-8")).splitlines()
    assert sum(max(1, -(-len(line) // WIDTH)) for line in lines) <= 4 * SCREEN
    assert page in NO_COMMAND or "```bash" in lines[:10]
    assert max(len(line) for line in lines if not line.startswith("|")) <= 140


@pytest.fixture
def as_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory like a checkout, with what the pages name: a model under its id of the hub, chats, another program's
    checkpoint."""
    for name in ("recipes", "launch", "ds_configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    model = tmp_path / "Qwen" / "Qwen3-0.6B"
    shutil.copytree(prepare().model, model)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint-3000").symlink_to(model)
    config = re.findall(r"^```yaml\n(.*?)^```", USER_PAGES["your-config"].read_text(), re.DOTALL | re.MULTILINE)[0]
    turns = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "return 1"}]
    monkeypatch.chdir(tmp_path)
    file_with(model / "chat_template.jinja", read_chat_template("plain"))
    return files_in(tmp_path, {"axolotl.yaml": config, "chats.jsonl": f"{json.dumps({'messages': turns})}\n" * 40})


def ran(line: str) -> str:
    """What a command prints. It ends well; with 1, lint and doctor found something, and memory that nothing fits."""
    said = kit_main(*shlex.split(line, comments=True)[1:])
    assert said.code in ((0, 1) if line.split()[1] in ("lint", "doctor", "memory") else (0,)), (
        f"{line}: {said.err[:500]}"
    )
    return said.out


FIRST = [page for page in USER_PAGES if page not in {*NO_COMMAND, "ui", "fine-tune"}]


@pytest.mark.parametrize("page", FIRST)
def test_the_first_command_of_a_page_runs_as_it_stands(page: str, as_a_user: Path) -> None:
    """That of fine-tune.md trains (test_first_run.py); that of ui.md is a server (tests/ui)."""
    assert ran(blocks(USER_PAGES[page])[0][0])


@pytest.mark.nightly
@pytest.mark.parametrize("page", FIRST)
def test_every_block_of_bash_runs_as_it_stands(page: str, as_a_user: Path) -> None:
    assert all(ran(line) for block in blocks(USER_PAGES[page]) for line in block)


def test_what_a_page_links_to_or_names_is_there() -> None:
    """In how-to pages the reader makes the files that are named."""
    named = re.compile(r"`((?:kit|tests|benchmarks|scripts|recipes|examples)/[\w/.-]+\.\w+)`")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        linked = [page.parent / target for target in re.findall(r"\]\((?!http)([^)#]+)\)", text)]
        files = [ROOT / name for name in named.findall(text) if page.parent.name != "how-to"]
        assert [place for place in (*linked, *files) if not place.exists()] == [], page.name
