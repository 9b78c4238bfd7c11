"""Recipes: names looked up, paths resolved, overrides and one-level extends, every shipped file valid."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import jsonschema
import pytest

from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog import parse_cluster
from kit.specs.layout import PINNABLE, Flag, Layout, Pins
from kit.specs.recipe import load_recipe, merged_text
from kit.specs.schema import json_schema

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text("model: llama-3.1-8b\ncluster: 8xH100\nrun: {data: {train: data/train}}\n")
    return file


def test_names_are_looked_up_and_paths_are_the_recipes(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert (loaded.model.num_layers, loaded.cluster.num_gpus) == (32, 8)
    assert loaded.run is not None
    assert loaded.run.data.train == str(recipe.parent / "data" / "train")


def test_dotted_words_override(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["job.learning_rate=1e-5", "layout.tp=4", "cluster=2x8xH100"])
    assert (loaded.job.learning_rate, loaded.layout.tp, loaded.cluster.num_gpus) == (1e-5, 4, 16)
    cluster = load_recipe(recipe, ["cluster.host_ram_gib=500", "cluster.gpu=H200"]).cluster
    assert cluster == dataclasses.replace(parse_cluster("8xH100"), host_ram_gib=500.0, gpu=parse_cluster("8xH200").gpu)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("20B", 20 * 10**9),
        ("1.5B", 1_500_000_000),
        ("500m", 500_000_000),
        ("'0.9 T'", 9 * 10**11),
        ("1.5e9", 1_500_000_000),
        ("'1.5e9'", 1_500_000_000),
        ("1E+9", 10**9),
        ("10000000.0", 10**7),
        ("10_000", 10_000),
        ("10,000,000", 10**7),
    ],
)
def test_a_count_is_taken_as_people_write_it(
    recipe: Path, text: str, number: int, schema: jsonschema.Draft202012Validator
) -> None:
    loaded = load_recipe(recipe, [f"job.total_tokens={text}", f"run.validation_sequences={text}"])
    assert loaded.run is not None
    assert (loaded.job.total_tokens, loaded.run.validation_sequences) == (number, number)
    written = strict_yaml.parse_text(f"total_tokens: {text}", "").data
    schema.validate({"model": "m", "cluster": "c", "job": written})


@pytest.mark.parametrize(
    "text", ["4k", "4 K", "1.5", "1e-3", "1,5", "10,00", "1.0000000001B", "B", "-4M", "４", "true", ".inf"]
)
def test_what_is_no_count_is_refused(recipe: Path, text: str) -> None:
    with pytest.raises(SpecError, match="write the digits" if "k" in text.lower() else "whole number|valid integer"):
        load_recipe(recipe, [f"job.total_tokens={text}"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["layout.tpp=4"], "layout.tpp: unknown key; did you mean tp"),
        (["job.learning_rate"], "is not of the form section.key=value"),
        (["cluster=8xH1000"], "H100"),
        (["cluster=0xH100"], "0xH100"),
        (["model=llama-9-8b"], "llama-3"),
        (["jbo.seq_length=4"], "jbo: unknown key; did you mean job?"),
        (["layout.xxx=4"], "layout.xxx: unknown key; the nearest of "),
        (["job.objective=xxx"], "job.objective=xxx: the nearest of 7 are "),
        (["model=xxx"], "the nearest of "),
    ],
)
def test_a_bad_override_names_the_nearest_valid_name(recipe: Path, words: list[str], part: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_recipe(recipe, words)
    assert part in str(caught.value)
    if "the nearest of" in part:
        assert str(caught.value).rpartition(" are ")[2].count(", ") == 4, "five names"


def test_every_section_is_checked_before_giving_up(recipe: Path) -> None:
    recipe.write_text("modle: x\ncluster: 8xH1000\njob: {seq_length: -1}\n")
    with pytest.raises(SpecError) as caught:
        load_recipe(recipe)
    text = str(caught.value)
    assert all(part in text for part in ("modle: unknown key", "model: is required", "H1000", "seq_length=-1"))


def test_extends_lays_over_one_level(tmp_path: Path, recipe: Path) -> None:
    child, grandchild = tmp_path / "child.yaml", tmp_path / "grandchild.yaml"
    child.write_text("extends: mine.yaml\njob: {seq_length: 8192}\n")
    grandchild.write_text("extends: child.yaml\n")
    loaded = load_recipe(child)
    assert (loaded.model.name, loaded.job.seq_length) == (load_recipe(recipe).model.name, 8192)
    with pytest.raises(SpecError, match="one level is the limit"):
        load_recipe(grandchild)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yaml: cannot be read: No such file"):
        load_recipe(tmp_path / "none.yaml")


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_recipes_load_and_match_the_schema(file: Path, schema: jsonschema.Draft202012Validator) -> None:
    load_recipe(file)
    schema.validate(strict_yaml.read(file).data)
    schema.validate(strict_yaml.parse_text(merged_text(file), file.name).data)


def test_there_are_shipped_recipes() -> None:
    assert len(SHIPPED) >= 4


def test_the_committed_schema_is_the_generated_one() -> None:
    committed = json.loads((ROOT / "recipes" / "recipe.schema.json").read_text(encoding="utf-8"))
    assert committed == json_schema(), "run: python -m kit.specs.schema > recipes/recipe.schema.json"


def test_the_schema_refuses_an_unknown_key(schema: jsonschema.Draft202012Validator) -> None:
    with pytest.raises(jsonschema.ValidationError):
        schema.validate({"model": "m", "cluster": "c", "job": {"seq_lenght": 1}})


def test_pins_are_the_fields_of_a_layout() -> None:
    """Same names, order and limits; every one may be left out."""

    def without_columns(hint: Any) -> Any:
        if get_origin(hint) is not Annotated:
            return hint
        kind, *limits = get_args(hint)
        limits = [limit for limit in limits if not isinstance(limit, Flag)]
        return Annotated[kind, *limits] if limits else kind

    of_layout = get_type_hints(Layout, include_extras=True)
    wanted = {name: without_columns(of_layout[name]) | None for name in PINNABLE}
    assert get_type_hints(Pins, include_extras=True) == wanted
    assert list(wanted) == [field.name for field in dataclasses.fields(Pins)]
    assert dataclasses.astuple(Pins()) == (None,) * len(wanted)


def test_an_inline_cluster_starts_from_a_node_as_a_file_does(recipe: Path) -> None:
    described = "node: p5.48xlarge\nnum_nodes: 2\nprice_per_node_hour_usd: 40\n"
    recipe.with_name("cluster.yaml").write_text(described)
    recipe.write_text("model: llama-3.2-1b\ncluster:\n" + "".join(f"  {line}\n" for line in described.splitlines()))
    inline = load_recipe(recipe).cluster
    assert inline == parse_cluster(str(recipe.with_name("cluster.yaml")))
    assert (inline.num_gpus, inline.price_per_node_hour_usd, inline.price_date) == (16, 40.0, None)
    assert {"node", "gpu"} <= json_schema()["$defs"]["ClusterSpec"]["properties"].keys()
    recipe.write_text("model: llama-3.2-1b\ncluster:\n  node: p5.49xlarge\n")
    with pytest.raises(SpecError, match=r"mine.yaml:3: cluster.node: .*did you mean p5.48xlarge"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{validation: a}", "train is required and missing; give the prefix of one set, or several as blend"),
        ("{train: a, blend: {web: {path: a, weight: 1}}}", "train=a and blend are both there"),
        ("{blend: {web: {path: a, weight: -1}}}", "run.data.blend.web.weight=-1: should be greater than 0"),
        ("{blend: {web: {path: a, weight: 0}}}", "run.data.blend.web.weight=0: should be greater than 0"),
        ("{blend: {web: {path: a, wieght: 1}}}", "run.data.blend.web.wieght: unknown key; did you mean weight"),
        ("{blend: {a/b: {path: a, weight: 1}}}", "the data set 'a/b' has a name for metrics"),
    ],
)
def test_a_blend_that_is_none(tmp_path, data, said):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"model: llama-3.1-8b\ncluster: 8xH100\nrun: {{data: {data}}}\n")
    with pytest.raises(SpecError) as caught:
        load_recipe(file)
    assert said in str(caught.value)


def test_paths_of_a_blend_are_relative_to_the_recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    data = "{blend: {web: {path: d/web, weight: 7}}, validation_sets: {web: v/web}}"
    file.write_text(f"model: llama-3.1-8b\ncluster: 8xH100\nrun: {{data: {data}}}\n")
    found = load_recipe(file).run.data
    assert (found.blend["web"].path, found.validation_sets["web"]) == (str(tmp_path / "d/web"), str(tmp_path / "v/web"))
