"""No text of a recipe, a cluster file, a model directory or a plan becomes a line, a word or a key of its own.

Control characters are refused where text is read; every other character is quoted for the language of each file.
``CANARY`` is a file that only an injected command would make.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml as pyyaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import kit
from kit.emit.markdown import code
from kit.emit.run_directory import RunDirectory, files_of, write
from kit.errors import SpecError
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.base import Text, TextMapping
from kit.specs.catalog import load_model
from kit.specs.recipe import Recipe, RecipeFile, load_recipe
from kit.specs.run import DataSpec, RunSpec
from tests.emit.test_preflight import CONFIG

CONTROLS = [*map(chr, range(32)), *map(chr, range(127, 160)), "\u2028", "\u2029"]
EXAMPLES = (
    "x\ntouch CANARY",
    "$(touch CANARY)",
    "`touch CANARY`",
    "'; touch CANARY; '",
    "--flag",
    "x\u2028y",
    "#SBATCH --x",
)
PIECES = [
    "$(touch CANARY)",
    "`touch CANARY`",
    ";touch CANARY;",
    "';",
    '"; touch CANARY;"',
    "'; touch CANARY; '",
    "${X:-$(touch CANARY)}",
    "|touch CANARY",
    ">CANARY",
    "&&",
    "#SBATCH --x",
    "#",
    "%s",
    "%j",
    "\\",
    "\\n",
    '\\"',
    "'",
    '"',
    "--flag",
    "-",
    "=",
    ":",
    ",",
    "@",
    "!",
    "?",
    "*",
    "&",
    " ",
    "{",
    "}",
    "[",
    "]",
    "---",
    "...",
    "<b>",
    "[x](y)",
    "|",
    "**",
    "1e5",
    "1e-5",
    "0x1F",
    "null",
    "true",
    "on",
    "x",
    "7",
    "/a/b",
    "é",
    "模型",
    "😀",
    "\u00a0",
    "\ntouch CANARY\n",
    "\r#SBATCH --x\r",
    "\u2028",
    "\ufeff",
]
VALUES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
STUBS = ("accelerate", "deepspeed", "nsys", "pdsh", "python", "scontrol", "srun", "torchrun")
ENGINES = ["torch", "deepspeed", "megatron"]
Place = tuple[str | int, ...]


def fuzz(examples: int) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """The test with the same values each time: those above, and ``examples`` others."""

    def wrap(test: Callable[[str], None]) -> Callable[[], None]:
        for value in EXAMPLES:
            test = example(value=value)(test)
        settled = settings(derandomize=True, database=None, deadline=None, max_examples=examples)
        return settled(given(value=VALUES)(test))

    return wrap


def texts(kind: Any, place: Place = ()) -> Iterator[tuple[Place, bool]]:
    """Every text below a spec: its place, and whether it is a key there. Fails for text that is not checked."""
    assert kind is not str, f"{place}: a spec's text has the type Text, which refuses control characters"
    inner = typing.get_args(kind)
    if kind == Text:
        yield place, False
    elif kind == TextMapping:
        yield from (((*place, "rope_type"), False), (place, True), ((*place, "list"), False))
    elif dataclasses.is_dataclass(kind):
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            yield from texts(hint, (*place, name))
    elif typing.get_origin(kind) is dict:
        assert inner[0] == Text, place
        yield place, True
        yield from texts(inner[1], (*place, "key"))
    elif typing.get_origin(kind) is tuple:
        yield from texts(inner[0], (*place, 0))
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for option in inner:
            yield from texts(option, place)
    elif typing.get_origin(kind) is not typing.Literal:
        assert kind in (int, float, bool, type(None)), f"{place}: {kind}"


PLACES = [(kind, *text) for kind in (Plan, RunSpec) for text in texts(kind)]


@cache
def planned(engine: str) -> Plan:
    layers = "huggingface" if engine == "deepspeed" else None
    return kit.plan("llama-3.1-8b", "p5.48xlarge:2", pins=kit.Pins(engine=engine, implementation=layers))


def plain(kind: type) -> dict[str, Any]:
    return strict_yaml.to_plain(planned("deepspeed") if kind is Plan else RunSpec(data=DataSpec(train="train")))


def put(data: Any, place: Place, is_key: bool, text: str) -> None:
    for step in place if is_key else place[:-1]:
        if isinstance(data, dict) and data.get(step) is None:
            data[step] = {}
        data = data[step]
    if is_key:
        data[text] = 1.0
    elif isinstance(data, list):
        data[:] = [text, *data[1:]]
    else:
        data[place[-1]] = [text] if place[-1] == "list" else text


def hostile(plan: Plan, value: Any) -> Plan:
    """The plan with ``value(i)`` for its i-th text; keys that the cost model chose are left."""
    data = strict_yaml.to_plain(plan)
    data["model"]["rope_scaling"] = {"rope_type": "llama3", **(data["model"]["rope_scaling"] or {})}
    for index, (kind, place, is_key) in enumerate(PLACES):
        if kind is Plan and place[-1] != "rope_type" and (not is_key or place[-1] == "rope_scaling"):
            put(data, place, is_key, value(index))
    return strict_yaml.parse(Plan, data, strict_yaml.Document(name="plan", data=data, lines={}))


def files(engine: str, value: str) -> dict[str, str]:
    """What is emitted where every text is ``value``; nothing where it is refused, as control characters must be."""
    try:
        return files_of(hostile(planned(engine), lambda index: value))
    except SpecError:
        assert set(value) & set(CONTROLS), "refused without a reason"
        return {}


def leaves(data: Any) -> Any:
    """Nested values as pairs, which show a key that was lost, added or moved."""
    if isinstance(data, dict):
        return [(key, leaves(value)) for key, value in data.items()]
    return [leaves(value) for value in data] if isinstance(data, list) else data


def replaced(data: Any, value: str) -> Any:
    """``harmless-N`` as the value."""
    if isinstance(data, list | tuple):
        return type(data)(replaced(part, value) for part in data)
    return value if isinstance(data, str) and re.fullmatch(r"harmless-\d+", data) else data


@cache
def harmless(engine: str) -> dict[str, str]:
    return files_of(hostile(planned(engine), lambda index: f"harmless-{index}"))


# What is refused


def test_every_text_of_a_spec_is_checked() -> None:
    assert len(PLACES) >= 23
    for kind in (Recipe, RecipeFile):
        assert list(texts(kind))


@pytest.mark.parametrize(
    ("kind", "place", "is_key"), PLACES, ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else ""
)
def test_control_characters_are_refused_when_read(kind: type, place: Place, is_key: bool) -> None:
    for control in CONTROLS:
        data, text = plain(kind), f"x{control}touch CANARY"
        put(data, place, is_key, text)
        with pytest.raises(SpecError) as caught:
            strict_yaml.parse(kind, data, strict_yaml.Document(name="file", data=data, lines={}))
        message = str(caught.value)
        owner = place[:-1] if place[-1] == "list" or "rope_scaling" in place[:-1] else place
        assert message.startswith(f"file: {'.'.join(map(str, owner))}"), message
        assert repr(text) in message
        assert f"U+{ord(control):04X}" in message
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "recipe",
    [
        "model: {name: TEXT}",
        "cluster: {name: TEXT}",
        "cluster: {gpu: {name: TEXT}}",
        "model: {rope_scaling: {rope_type: TEXT}}",
        "run: {data: {train: TEXT}}",
        "run: {nvme_path: TEXT}",
        "TEXT: 1",
        "job: {TEXT: 1}",
        "job: {precision: TEXT}",
        "model: TEXT",
        "cluster: TEXT",
        "extends: TEXT",
    ],
)
def test_a_recipe_is_refused_in_lines_of_its_own(recipe: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.replace("TEXT", r'"x\ntouch CANARY\u2028\e[2J"'))
    with pytest.raises(SpecError) as caught:
        load_recipe(file)
    for line in str(caught.value).splitlines():
        assert line.startswith("recipe.yaml")
        assert line.isprintable()


def test_a_model_directory_is_refused(tmp_path: Path) -> None:
    for name, config in (
        ("x\ntouch CANARY", CONFIG),
        ("model", CONFIG | {"rope_parameters": {"rope_type": "linear\ntouch CANARY", "factor": 2.0}}),
        ("keys", CONFIG | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "x\ntouch": 1}}),
    ):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(SpecError, match=r"control character U\+000A") as caught:
            load_model(directory)
        assert len(str(caught.value).splitlines()) == 1


def test_paths_are_refused_whatever_made_them(tmp_path: Path) -> None:
    directory = tmp_path / "x\ntouch CANARY"
    directory.mkdir()
    (directory / "recipe.yaml").write_text("model: llama-3.2-1b\ncluster: 8xH100\nrun: {data: {train: train}}\n")
    run = RunSpec(data=DataSpec(train="train"))
    with pytest.raises(SpecError, match="control character"):
        load_recipe(directory / "recipe.yaml")
    with pytest.raises(SpecError, match="control character"):
        write(planned("torch"), run, directory / "run")
    (tmp_path / "link").symlink_to(directory, target_is_directory=True)
    with pytest.raises(SpecError, match="control character"):
        load_recipe(tmp_path / "link" / "recipe.yaml")


@pytest.mark.parametrize("name", ["run.yaml", "plan.yaml"])
def test_an_edited_run_directory_is_refused(name: str, tmp_path: Path) -> None:
    """The hash of the edited file is made to fit, as whoever edits it can."""
    path = write(planned("torch"), RunSpec(data=DataSpec(train="train")), tmp_path / "run").path
    text = re.sub(r"(train|rule): .*", r'\1: "x\\ntouch CANARY"', (path / name).read_text())
    (path / name).write_text(text)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SpecError, match=r"control character U\+000A"):
        RunDirectory.open(path)


# What is quoted


@pytest.mark.parametrize("engine", ENGINES)
def test_yaml_and_json_hold_each_value_under_its_own_key(engine: str, tmp_path: Path) -> None:
    cases = 0

    @fuzz(30)
    def hold(value: str) -> None:
        nonlocal cases
        emitted = files(engine, value)
        for name, text in emitted.items():
            if name.endswith((".json", ".yaml")):
                for parse in [json.loads] if name.endswith(".json") else [pyyaml.safe_load, own]:
                    found, expected = leaves(parse(text)), replaced(leaves(parse(harmless(engine)[name])), value)
                    assert found == expected, name
                cases += 1
        if not emitted:
            return
        run = RunSpec(data=DataSpec(train=value, validation=value), model_path=value, nvme_path=value)
        for parse in (pyyaml.safe_load, own):
            assert parse(strict_yaml.dump(strict_yaml.to_plain(run))) == strict_yaml.to_plain(run)

    hold()
    assert cases >= 24


def own(text: str) -> dict[str, Any]:
    return strict_yaml.parse_text(text, "file").data


@pytest.mark.parametrize("engine", ENGINES)
def test_no_value_makes_a_line(engine: str) -> None:
    """Scripts, hostfile, .deepspeed_env and pages: as many lines as with harmless values, and the same directives."""
    assert {"launch.sh", "launch_elastic.sh", "launch_hosts.sh", "slurm.sbatch", "hostfile"} <= set(harmless(engine))

    @fuzz(30)
    def hold(value: str) -> None:
        for name, text in files(engine, value).items():
            lines, expected = text.splitlines(), harmless(engine)[name].splitlines()
            if name.endswith((".json", ".yaml")):
                continue
            assert len(lines) == len(expected), name
            for line, other in zip(lines, expected, strict=True):
                comment = name.endswith(".sh") and line.startswith("# ") and other.startswith("# ")
                heading = name == "ds_config.md" and "harmless" in other
                job = re.fullmatch(r"#SBATCH --job-name=[A-Za-z0-9_.-]*", line) and "--job-name=" in other
                assert line == other or comment or heading or job, (name, line)

    hold()


@pytest.mark.parametrize("engine", ENGINES)
def test_no_value_is_executed(engine: str, tmp_path: Path) -> None:
    """Every script is read by ``bash -n`` and run, beside stand-ins for what it starts."""
    (tmp_path / "bin").mkdir()
    for name in STUBS:
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "RDZV_ENDPOINT": "127.0.0.1:29600",
        "GLOO_SOCKET_IFNAME": "lo",
        "MEGATRON_LM": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node-0",
        "SLURM_JOB_ID": "7",
        "TMPDIR": str(tmp_path),
    }
    done: set[str] = set()

    @fuzz(30)
    def hold(value: str) -> None:
        emitted = files(engine, value)
        scripts = {name: text for name, text in emitted.items() if name.endswith((".sh", ".sbatch"))}
        for name, text in emitted.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        for name, text in scripts.items():
            if text in done:
                continue
            done.add(text)
            for words in (["bash", "-n", name], ["bash", name]):
                ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
                assert not list(tmp_path.rglob("CANARY*")), (name, value)
                assert (ended.returncode, ended.stderr) == (0, ""), (name, value)

    hold()
    assert len(done) >= 24


@fuzz(100)
def test_pages_show_a_value_as_it_is(value: str) -> None:
    assume(not set(value) & set(CONTROLS))
    (paragraph,) = (token for token in MarkdownIt().parse(f"- {code(value)}") if token.type == "inline")
    assert [(part.type, part.content.strip(" ")) for part in paragraph.children or []] == [
        ("code_inline", value.strip(" "))
    ]


def test_the_configuration_page_shows_names_as_they_are() -> None:
    value = "**x** <b> [y](z) `` |"
    text = files_of(hostile(planned("deepspeed"), lambda index: value))["ds_config.md"]
    paragraph = next(token for token in MarkdownIt().parse(text) if token.type == "inline" and value in token.content)
    kinds = [(part.type, part.content) for part in paragraph.children or []]
    assert kinds.count(("code_inline", value)) == 2
    assert {kind for kind, _ in kinds} == {"code_inline", "text"}
