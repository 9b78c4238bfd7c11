"""Models, tokenizers and data sets by their ids, from a small hub on the loopback address and from the cache."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from kit.errors import SpecError
from kit.specs import hub as of_kit
from kit.specs.catalog import load_model
from kit.specs.run import RunSpec, absolute_paths
from tests.support import ROOT
from tests.support.assets import prepare
from tests.support.files import file_with, files_in
from tests.support.hub import REVISION, Hub, running
from tests.support.in_process import kit_main
from tests.support.refusals import refusal

TOKEN = "hf_never_printed"


class Place(NamedTuple):
    """A directory to work in, and a hub with its cache there."""

    hub: Hub
    path: Path

    def kit(self, *words: str, code: int = 0, home: str = "home", **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs ``kit WORDS`` there; it ends with ``code``."""
        return self._python("-m", "kit", *words, code=code, home=home, **variables)

    def _python(
        self, *words: str, code: int = 0, home: str = "home", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = self.hub.environment(self.path / home, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables)
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=self.path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert TOKEN not in done.stdout + done.stderr
        return done

    def program(self, text: str) -> list[str]:
        """Runs a program there; the lines that it prints."""
        return self._python("-c", text).stdout.splitlines()

    def refusal(self, *words: str, **given: str) -> str:
        """The last line that ``kit WORDS`` writes on stderr; it ends with 2."""
        return self.kit(*words, code=2, **given).stderr.splitlines()[-1]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with running(Hub(models={"org/tiny": prepare().model}, token=TOKEN)) as hub:
        yield Place(hub, tmp_path)


PLAN = ("--gpus", "8xH100")


def test_a_model_is_planned_by_its_id_and_fetched_once(place: Place) -> None:
    first = place.kit("plan", "org/tiny", *PLAN)
    assert first.stderr == f"org/tiny: fetching config.json from {place.hub.address}\n"
    assert place.hub.fetched() == ["config.json"]
    assert first.stdout.startswith("tiny · 328k parameters")
    assert "kit train org/tiny --data text.jsonl --gpus 8xH100 --out runs/a" in first.stdout
    place.hub.asked.clear()
    second = place.kit("plan", "org/tiny", *PLAN, "--save", "plan.yaml", HF_HUB_OFFLINE="1")
    assert (second.stdout[:80], second.stderr, place.hub.asked) == (first.stdout[:80], "", [])
    assert f"config.json of org/tiny at {REVISION}" in (place.path / "plan.yaml").read_text()


LIKE = ("has no model org/qwen3-8, or it is private", "did you mean qwen3-8b?")
GATED = ("model org/tiny is gated: accept its licence at ", "/org/tiny; then run hf auth login", "HF_TOKEN")
REFUSED: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    # model, variables, what is said
    "missing": ("org/qwen3-8", {}, LIKE),
    "missing for who has a token": ("org/qwen3-8", {"HF_TOKEN": TOKEN}, LIKE),
    "gated": ("org/tiny", {}, GATED),
    "gated for another's token": ("org/tiny", {"HF_TOKEN": f"{TOKEN}_of_another"}, GATED[:1]),
    "empty": ("org/empty", {}, ("org/empty has no config.json",)),
    "large": ("org/large", {}, ("config.json of org/large has 9,437,184 bytes",)),
    "no hub": ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, (
        "http://127.0.0.1:9 gave no whole answer", "run hf download org/tiny where there is a network")),
    "no network": ("org/tiny", {"HF_HUB_OFFLINE": "1"}, ("HF_HUB_OFFLINE is set",)),
}  # fmt: skip


@pytest.mark.everyday("missing", "gated", "large", "empty", "no network", "no hub")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fetched_is_one_line(case: str, place: Place) -> None:
    model, variables, said = REFUSED[case]
    for name in ("empty", "large"):
        place.hub.models[f"org/{name}"] = place.path / name
        (place.path / name).mkdir()
    (place.path / "large" / "config.json").write_text(" " * (9 << 20))
    place.hub.gated.add("org/tiny")
    refused = place.refusal("plan", model, *PLAN, **variables)
    assert [part for part in said if part not in refused] == []
    assert bool(place.hub.asked) == (not case.startswith("no "))


def test_a_cut_connection_leaves_no_half_file_and_a_token_opens_a_gate(place: Place) -> None:
    place.hub.cut.add("config.json")
    assert "gave no whole answer" in place.refusal("plan", "org/tiny", *PLAN)
    place.hub.cut.clear()
    place.hub.gated.add("org/tiny")
    place.kit("plan", "org/tiny", *PLAN, HF_TOKEN=TOKEN)
    assert place.hub.tokens == {TOKEN}


BY_IDS: dict[str, object] = {
    "model": "org/tiny",
    "cluster": "1xcpu",
    "job": {
        "objective": "pretrain", "seq_length": 32, "global_batch_size": 4, "precision": "fp32", "lora": {"rank": 2},
    },
    "layout": {"engine": "torch"},
    "run": {"model_path": "org/tiny", "steps": 2, "data": {"train": "train", "allow_many_epochs": True}},
}  # fmt: skip
STEP = "run/checkpoints/step-00000002"


def from_rows_to_an_exported_model() -> None:
    """Four commands in one process, which imports the libraries once. Of a run on plain torch none imports the other
    engines, which takes seconds and may lack."""
    from kit.training.__main__ import main as train

    for words in (
        "convert data org/rows --tokenizer org/tiny --out train",
        "emit recipe.yaml --out run",
        "train run",
        f"convert model {STEP} --out model --merge-into org/tiny",
    ):
        command, *rest = words.split()
        assert (train(rest) if command == "train" else kit_main(command, *rest).code) == 0, words
    assert {"megatron", "deepspeed"} & sys.modules.keys() == set()


@pytest.mark.slow
def test_a_run_by_ids_alone_from_rows_to_an_exported_model(place: Place) -> None:
    """The run keeps ids; nothing is fetched twice, and weights only to train; the export, which has the tokenizer, asks
    the hub for nothing."""
    place.hub.data_sets["org/rows"] = files_in(place.path / "set", {
        f"data/{name}-00000-of-00001.jsonl": json.dumps({"text": f"{text} and more words " * 40}) + "\n"
        for name, text in (("train", "to learn"), ("test", "to be held out"))
    })  # fmt: skip
    (place.path / "recipe.yaml").write_text(yaml.safe_dump(BY_IDS))
    place.program(f"from {__name__} import *; from_rows_to_an_exported_model()")
    told = json.loads((place.path / "train.json").read_text())
    assert (told["num_documents"], told["tokenizer"]) == (1, "tiny")
    fetched = place.hub.fetched()
    assert len(fetched) == len({*fetched})
    assert (fetched[-1], place.hub.asked[-1].endswith("/model.safetensors")) == ("model.safetensors", True)
    assert yaml.safe_load((place.path / "run" / "run.yaml").read_text())["model_path"] == "org/tiny"
    assert (place.path / "model" / "tokenizer.json").is_file()


def test_pickles_and_code_are_never_fetched(place: Place) -> None:
    model = shutil.copytree(prepare().model, place.path / "old")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    files_in(model, {"modeling.py": "raise SystemExit(1)", "original/model.safetensors": "another format"})
    place.hub.models["org/old"] = model
    assert place.program(lookups("local('org/old', weights=True)"))[0].startswith("SpecError: org/old has no complete ")
    words = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(place.hub.fetched()) == words


def lookups(*calls: str) -> str:
    """A program that makes these calls of ``hub_files`` and prints a line of each: the answer, or the error."""
    tries = "".join(
        f"try: print({call})\nexcept KitError as error: print(type(error).__name__, error, sep=': ')\n"
        for call in calls
    )
    return f"from kit.errors import KitError\nfrom kit.training.hub_files import *\n{tries}"


@pytest.mark.slow
def test_processes_of_a_node_fetch_a_model_once(place: Place) -> None:
    command = [sys.executable, "-c", lookups("local('org/tiny', weights=True)")]
    environment = place.hub.environment(place.path / "home", PYTHONPATH=str(ROOT))
    started = [
        subprocess.Popen(
            command, env=environment, cwd=place.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len({out for out, _ in said}) == 1
    assert sorted(err.count("fetching weights") for _, err in said) == [0, 0, 1]
    assert len(place.hub.fetched()) == len(set(place.hub.fetched())) == 5


def test_a_shard_that_is_missing_from_the_cache_is_fetched(place: Place) -> None:
    """A cache that another program left: of the weights, the index and one of two shards."""
    model = shutil.copytree(prepare().model, place.path / "sharded")
    for part in ("a", "b"):
        shutil.copy(model / "model.safetensors", model / f"{part}.safetensors")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    )
    place.hub.models["org/sharded"] = model
    cache = place.path / "home" / "hub" / "models--org--sharded"
    snapshot = shutil.copytree(model, cache / "snapshots" / REVISION)
    (snapshot / "b.safetensors").unlink()
    file_with(cache / "refs" / "main", REVISION)
    (found,) = place.program(lookups("local('org/sharded', weights=True)"))
    assert Path(found, "b.safetensors").is_file()
    assert place.hub.fetched() == ["b.safetensors"]


def test_configurations_and_splits_of_a_data_set(place: Place) -> None:
    rows = {f"{name}.jsonl": json.dumps({"text": name}) + "\n" for name in ("en/train", "en/test", "fr/train")}
    configs = [
        {"config_name": lang, "data_files": [{"split": s, "path": f"{lang}/{s}.jsonl"} for s in splits]}
        for lang, splits in (("en", ["train", "test"]), ("fr", ["train"]))
    ]
    readme = {"README.md": f"---\n{yaml.safe_dump({'configs': configs})}---\n"}
    place.hub.data_sets["org/rows"] = files_in(place.path / "set", rows | readme)
    names = ("org/rows", "org/rows:fr:test", "org/none", "org/rows:en:test", "org/rows:fr")
    several, no_split, missing, test, train = place.program(lookups(*(f"data_set_files({name!r})" for name in names)))
    assert several.startswith("DataError: ")
    assert "org/rows:CONFIGURATION" in several
    assert "name one as org/rows:fr:SPLIT: train" in no_split
    assert "has no data set org/none" in missing
    assert test.endswith("en/test.jsonl')]")
    assert train.endswith("fr/train.jsonl')]")
    assert [name for name in place.hub.fetched() if name.endswith(".jsonl")] == ["test.jsonl", "train.jsonl"]


@pytest.mark.parametrize(
    ("place", "main", "layers"), [("HF_HOME", "r0", 1), ("HF_HOME", None, 2), ("HF_HUB_CACHE", None, 2)]
)
def test_the_cache_of_another_program_is_read_without_the_library(
    place: str, main: str | None, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """main's revision wins; without it the newest snapshot."""
    cached = tmp_path / "hub" / "models--org--tiny"
    for number in (0, 1):
        revision = shutil.copytree(prepare().model, cached / "snapshots" / f"r{number}")
        config = json.loads((revision / "config.json").read_text()) | {"num_hidden_layers": number + 1}
        (revision / "config.json").write_text(json.dumps(config))
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", "/nowhere")
    monkeypatch.setenv(place, str(tmp_path if place == "HF_HOME" else tmp_path / "hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    if main:
        file_with(cached / "refs" / "main", main)
    model = load_model("org/tiny")
    assert (model.num_layers, model.name) == (layers, "tiny")
    assert "pip install 'deepspeed-megatron-kit[hub]'" in refusal(SpecError, load_model, "org/other")


def test_adapters_name_their_model_by_its_id() -> None:
    cached = Path("/home/me/.cache/huggingface/hub/models--org--tiny/snapshots") / REVISION
    assert (of_kit.id_of(cached), of_kit.id_of(Path("/models/tiny"))) == ("org/tiny", "/models/tiny")


@pytest.mark.parametrize(
    ("name", "id_form"),
    [
        ("Qwen/Qwen3-8B", True), ("org/a.b_c-d", True), ("models/llama-3.1-8b", False), ("data/train", False),
        ("qwen3-8b", False), ("./org/name", False), ("../org/name", False), ("a/b/c", False), ("/org/name", False),
        ("~/name", False), ("org/na--me", False), ("org/..", False), ("org/", False), ("org/na me", False),
        (f"org/{'x' * 96}", False),
    ],
)  # fmt: skip
def test_the_form_of_an_id(name: str, id_form: bool) -> None:
    assert of_kit.is_id(name) is id_form


@pytest.mark.parametrize(
    ("field", "given", "there"),
    [
        ("model_path", "org/name", False), ("model_path", "org/name", True), ("model_path", "models/name", False),
        ("nvme_path", "fast/disk", False),
    ],
)  # fmt: skip
def test_a_path_wins_over_an_id(field: str, given: str, there: bool, tmp_path: Path) -> None:
    """Also a path whose end is not there yet, if its first folder is."""
    if there:
        (tmp_path / "org").mkdir()
    is_id = given == "org/name" and not there
    found = getattr(absolute_paths(RunSpec(**{field: given}), tmp_path), field)
    assert found == (given if is_id else str(tmp_path / given))
