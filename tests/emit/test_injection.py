"""No text of a recipe, a cluster file, a model directory or a plan becomes a line, a word or a key of its own.

Control characters are refused where text is read; every other character is quoted for the language of each file.
``CANARY`` is a file that only an injected command would make.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml as pyyaml
from hypothesis import assume, given
from markdown_it import MarkdownIt

from kit.emit.markdown import code
from kit.emit.markdown import plain as plain_or_code
from kit.emit.run_directory import RunDirectory, files_of, write
from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog import load_model
from kit.specs.recipe import Recipe, load_recipe
from kit.specs.run import DataSpec, RunSpec
from scripts.recipe_schema import RecipeFile
from tests.emit.injection_cases import (
    OF_ENGINE,
    PLACES,
    Place,
    files,
    leaves,
    plain,
    planned,
    put,
    texts,
    with_texts,
)
from tests.emit.plans import CONFIG, stand_in
from tests.emit.test_run_directory import resealed
from tests.support import hostile
from tests.support.files import file_with
from tests.support.refusals import refusal

# What is refused


def test_every_text_of_a_spec_is_checked() -> None:
    assert len(PLACES) >= 23
    assert all(list(texts(kind)) for kind in (Recipe, RecipeFile))


@pytest.mark.parametrize(
    ("kind", "place", "is_key"), PLACES, ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else ""
)
def test_control_characters_are_refused_when_read(kind: type, place: Place, is_key: bool) -> None:
    for control in hostile.CONTROLS:
        data, text = plain(kind), f"x{control}touch CANARY"
        put(data, place, is_key, text)
        document = strict_yaml.Document(name="file", data=data, lines={})
        message = refusal(SpecError, strict_yaml.parse, kind, data, document)
        inside = place[-1] == "list" or {"rope_scaling", "config", "megatron", "deepspeed"} & set(place[:-1])
        owner = place[:-1] if inside else place
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
    file = file_with(tmp_path / "recipe.yaml", recipe.replace("TEXT", r'"x\ntouch CANARY\u2028\e[2J"'))
    for line in refusal(SpecError, load_recipe, file).splitlines():
        assert line.startswith("recipe.yaml")
        assert line.isprintable()


def test_a_model_directory_is_refused(tmp_path: Path) -> None:
    for name, config in (
        ("x\ntouch CANARY", CONFIG),
        ("model", CONFIG | {"rope_parameters": {"rope_type": "linear\ntouch CANARY", "factor": 2.0}}),
        ("keys", CONFIG | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "x\ntouch": 1}}),
    ):
        directory = tmp_path / name
        file_with(directory / "config.json", json.dumps(config))
        (line,) = refusal(SpecError, load_model, directory).splitlines()
        assert "control character U+000A" in line


def test_paths_are_refused_whatever_made_them(tmp_path: Path) -> None:
    directory = tmp_path / "x\ntouch CANARY"
    file_with(directory / "recipe.yaml", "model: llama-3.2-1b\ncluster: 8xH100\nrun: {data: {train: train}}\n")
    run = RunSpec(data=DataSpec(train="train"))
    assert "control character" in refusal(SpecError, load_recipe, directory / "recipe.yaml")
    assert "control character" in refusal(SpecError, write, planned("torch"), run, directory / "run")
    (tmp_path / "link").symlink_to(directory, target_is_directory=True)
    assert "control character" in refusal(SpecError, load_recipe, tmp_path / "link" / "recipe.yaml")


@pytest.mark.parametrize("name", ["run.yaml", "plan.yaml"])
def test_an_edited_run_directory_is_refused(name: str, tmp_path: Path) -> None:
    """The hash of the edited file is made to fit, as whoever edits it can."""
    path = write(planned("torch"), RunSpec(data=DataSpec(train="train")), tmp_path / "run").path
    resealed(path, name, re.sub(r"(train|rule): .*", r'\1: "x\\ntouch CANARY"', (path / name).read_text()))
    assert "control character U+000A" in refusal(SpecError, RunDirectory.open, path)


# What is quoted

STUBS = ("accelerate", "deepspeed", "nsys", "pdsh", "python", "scontrol", "srun", "torchrun")
OF_NODE = {
    "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "RDZV_ENDPOINT": "127.0.0.1:29600", "GLOO_SOCKET_IFNAME": "lo",
    "MEGATRON_LM": ".", "SLURM_SUBMIT_DIR": ".", "SLURM_JOB_NODELIST": "node-0", "SLURM_JOB_ID": "7",
}  # fmt: skip
PARSERS = {".json": [json.loads], ".yaml": [pyyaml.safe_load, lambda text: strict_yaml.parse_text(text, "file").data]}


def check_values(text: str, usual: str, value: str, suffix: str) -> None:
    """Each value stands under its own key. Names by DNS rules are made of a value and have none of its signs."""
    text, usual = (re.sub(r"\bkit(-[a-z0-9-]*)?", "NAME", each) for each in (text, usual))
    assert [parse for parse in PARSERS[suffix] if leaves(parse(text), value) != leaves(parse(usual), value)] == []


def check_lines(name: str, text: str, usual: str) -> None:
    """As many lines as with harmless values, and the same ones but for comments, headings and a job's name."""
    for line, other in zip(text.splitlines(), usual.splitlines(), strict=True):
        comment = name.endswith(".sh") and line.startswith("# ") and other.startswith("# ")
        heading = name in ("ds_config.md", "README.md") and "harmless" in other
        job = re.fullmatch(r"#SBATCH --job-name=[A-Za-z0-9_.-]*", line) and "--job-name=" in other
        assert line == other or comment or heading or job, (name, line)


@pytest.mark.slow
@pytest.mark.parametrize("engine", OF_ENGINE)
def test_no_value_becomes_a_key_a_line_or_a_command(engine: str, tmp_path: Path) -> None:
    """In YAML and JSON, scripts, hostfile, .deepspeed_env and pages. Scripts are read by ``bash -n`` and run, beside
    stand-ins for what they start."""
    environment = stand_in(tmp_path / "bin", **dict.fromkeys(STUBS, "#!/bin/sh\nexit 0\n")) | OF_NODE
    environment["TMPDIR"] = str(tmp_path)
    usual, done = files(engine, "harmless"), set()
    assert {"launch.sh", "launch_elastic.sh", "launch_hosts.sh", "slurm.sbatch", "hostfile"} <= set(usual)

    def hold(value: str) -> None:
        emitted = files(engine, value)
        for name, text in emitted.items():
            file_with(tmp_path / name, text).chmod(0o755)
            if (suffix := Path(name).suffix) in PARSERS:
                check_values(text, usual[name], value, suffix)
            else:
                check_lines(name, text, usual[name])
        for name in [name for name, text in emitted.items() if name.endswith((".sh", "batch")) and text not in done]:
            done.add(emitted[name])
            for words in (["bash", "-n", name], ["bash", name]):
                ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
                assert not list(tmp_path.rglob("CANARY*")), (name, value)
                assert (ended.returncode, ended.stderr) == (0, ""), (name, value)
        if emitted:
            run = RunSpec(data=DataSpec(train=value, validation=value), model_path=value, nvme_path=value)
            for parse in PARSERS[".yaml"]:
                assert parse(strict_yaml.dump(strict_yaml.to_plain(run))) == strict_yaml.to_plain(run)

    for value in hostile.CANARY:
        hold(value)
    hostile.fuzz(8)(given(hostile.TEXTS)(hold))()
    assert len(done) >= 24


@hostile.fuzz(100)
@given(hostile.TEXTS)
def test_pages_show_a_value_as_it_is(value: str) -> None:
    assume(not set(value) & set(hostile.CONTROLS))
    (paragraph,) = (token for token in MarkdownIt().parse(f"- {code(value)}") if token.type == "inline")
    assert [(part.type, part.content.strip(" ")) for part in paragraph.children or []] == [
        ("code_inline", value.strip(" "))
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("A-1.5b:x/y z", "A-1.5b:x/y z"), ("a: b", "`a: b`"),
        ("a_b", "`a_b`"), ("a  b", "`a  b`"), ("`a", "`` `a ``"), ("a`", "`` a` ``"),
        ("a``b", "```a``b```"), (" a", "`  a `"), ("-a", "`-a`"),
    ],
)  # fmt: skip
def test_plain_words_are_no_code(text: str, shown: str) -> None:
    assert plain_or_code(text) == shown


def test_the_configuration_page_shows_names_as_they_are() -> None:
    value = "**x** <b> [y](z) `` |"
    text = files_of(with_texts(planned("deepspeed"), value))["ds_config.md"]
    paragraph = next(token for token in MarkdownIt().parse(text) if token.type == "inline" and value in token.content)
    kinds = [(part.type, part.content) for part in paragraph.children or []]
    assert kinds.count(("code_inline", value)) == 2
    assert {kind for kind, _ in kinds} == {"code_inline", "text"}
