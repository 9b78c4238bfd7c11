"""Recipes: names looked up, paths resolved, overrides and one-level extends, every shipped file valid."""

import dataclasses
import re
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from kit.errors import SpecError
from kit.specs import shipped, strict_yaml
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Layout, Pins
from kit.specs.other_programs import program_of
from kit.specs.recipe import job_and_cluster, load_recipe, merged_text, recipe_of_document, run_of
from scripts.recipe_schema import json_schema
from tests.support import ROOT
from tests.support.files import file_with, files_in
from tests.support.refusals import refusal

SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
DPO, TINY = "llama-3.1-8b-trl-dpo-zero3-8xh100", "tiny-llama-pretrain-zero3-2xcpu"
HEAD = "model: llama-3.1-8b\ncluster: 8xH100\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return file_with(tmp_path / "mine.yaml", f"{HEAD}run: {{data: {{train: data/train}}}}\n")


def test_names_are_looked_up_and_paths_are_the_recipes(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_recipe(recipe)
    assert (loaded.name, loaded.model.num_layers, loaded.cluster.num_gpus) == ("mine", 32, 8)
    assert loaded.run.data.train == str(recipe.parent / "data" / "train")
    assert (loaded.job, loaded.layout) == (JobSpec(), Pins())
    files_in(recipe.parent, {"mine/config.json": '{"model_type": "llama"}', "own.yaml": "node: p5.48xlarge:3\n"})
    monkeypatch.chdir("/")
    assert load_recipe(recipe, ["cluster=own.yaml"]).cluster.num_gpus == 24
    assert "mine.yaml:1: model: config.json of mine lacks" in refusal(SpecError, load_recipe, recipe, ["model=mine"])


def test_dotted_words_override(recipe: Path) -> None:
    words = ["job.learning_rate=1e-5", "layout.tp=4", "cluster=2x8xH100", "job.optimizer.eps=1e-6", "job.lora.rank=4"]
    loaded = load_recipe(recipe, words)
    assert (loaded.job.learning_rate, loaded.layout.tp, loaded.cluster.num_gpus) == (1e-5, 4, 16)
    assert (loaded.job.optimizer.eps, loaded.job.optimizer.beta1, loaded.job.lora) == (1e-6, 0.9, LoraSpec(rank=4))
    cluster = load_recipe(recipe, ["cluster.host_ram_gib=500", "cluster.gpu=H200"]).cluster
    assert cluster == dataclasses.replace(parse_cluster("8xH100"), host_ram_gib=500.0, gpu=parse_cluster("8xH200").gpu)


def test_sections_without_a_file() -> None:
    """Arguments beside a catalog name, and changes of a plan's job."""
    run = run_of(["run.steps=5", "run.data.train=a"], Path("/b"))
    assert (run.steps, run.data.train, run_of([], Path())) == (5, "/b/a", None)
    words = ["job.total_tokens=5", "job.grad_clip=2", "cluster.num_nodes=2", "cluster.inter_node_gbytes_per_s=50"]
    given = {"epochs": 2.0, "seq_length": 8}
    changed, cluster = job_and_cluster(load_model("llama-3.1-8b"), parse_cluster("8xH100"), given, words)
    assert (changed, cluster.num_gpus) == (JobSpec(total_tokens=5, seq_length=8, grad_clip=2.0), 16)


@pytest.mark.parametrize(
    ("line", "words", "said"),
    [
        ("run: {data: {train: x}}", [], ""),
        ("extends: a.yaml", [], "typed:3: extends names a file"),
        ("jbo: {}", [], "typed:3: jbo: unknown key"),
        ("", [f"model={ROOT / 'recipes'}"], "neither in the catalog"),
        ("", [f"cluster={ROOT / 'recipes'}"], "is not understood"),
    ],
)
def test_text_instead_of_a_file_reads_none(line: str, words: list[str], said: str) -> None:
    text = strict_yaml.parse_text(f"{HEAD}{line}\n", "typed")
    if said:
        assert said in refusal(SpecError, recipe_of_document, text, words)
    else:
        assert recipe_of_document(text).run is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("20B", 20 * 10**9), ("1.5B", 1_500_000_000), ("500m", 500_000_000), ("'0.9 T'", 9 * 10**11), ("'1.5e9'",
         15 * 10**8),
        ("1.5e9", 1_500_000_000), ("1E+9", 10**9), ("10000000.0", 10**7), ("10_000", 10_000), ("10,000,000", 10**7),
    ],
)  # fmt: skip
def test_a_count_is_taken_as_people_write_it(
    recipe: Path, text: str, number: int, schema: jsonschema.Draft202012Validator
) -> None:
    loaded = load_recipe(recipe, [f"job.total_tokens={text}", f"run.validation_sequences={text}"])
    assert (loaded.job.total_tokens, loaded.run.validation_sequences) == (number, number)
    written = strict_yaml.parse_text(f"total_tokens: {text}", "").data
    schema.validate(
        {"model": "m", "cluster": "c", "job": written, "run": {"logging": {"gradients_at_steps": ["5", 5]}}}
    )


@pytest.mark.parametrize(
    "text", ["4k", "4 K", "1.5", "1e-3", "1,5", "10,00", "1.0000000001B", "B", "-4M", "４", "true", ".inf"]
)
def test_what_is_no_count_is_refused(recipe: Path, text: str) -> None:
    assert re.search(
        "write the digits" if "k" in text.lower() else "whole number|valid integer",
        refusal(SpecError, load_recipe, recipe, [f"job.total_tokens={text}"]),
    )


@pytest.mark.parametrize(
    ("text", "words", "part"),
    [
        ("", ["layout.tpp=4"], "layout.tpp: unknown key; did you mean tp"),
        ("", ["job.learning_rate"], "is not of the form section.key=value"),
        ("", ["job..seq_length=4"], "is not of the form"),
        ("", ["cluster=8xH1000"], "H100"),
        ("", ["cluster=0xH100"], "0xH100"),
        ("", ["model=llama-9-8b"], "llama-3"),
        ("", ["jbo.seq_length=4"], "jbo: unknown key; did you mean job?"),
        ("", ["layout.xxx=4"], "layout.xxx: unknown key; the nearest of "),
        ("", ["job.objective=xxx"], "job.objective=xxx: the nearest of 7 are "),
        ("", ["model=xxx"], "the nearest of "),
        ("", ["model=null"], "mine.yaml: model: is required and missing"),
        ("", ["run.steps=5", "job.epochs=1"], "job.epochs=1 and run.steps=5: the length"),
        ("run: {data: {validation: a}}", [],
         "train is required and missing; give the prefix of one set, or several as blend"),
        ("run: {data: {train: a, blend: {web: {path: a, weight: 1}}}}", [], "train=a and blend are both there"),
        ("run: {data: {blend: {web: {path: a, weight: -1}}}}", [],
         "run.data.blend.web.weight=-1: should be greater than 0"),
        ("run: {data: {blend: {web: {path: a, wieght: 1}}}}", [],
         "run.data.blend.web.wieght: unknown key; did you mean weight"),
        ("run: {data: {blend: {a/b: {path: a, weight: 1}}}}", [], "the data set 'a/b' has a name for metrics"),
        ("extends: 7", [], "mine.yaml:3: extends=7: should be the path"),
        ("extends: other.yaml", [], "mine.yaml:3: extends='other.yaml': no such recipe beside mine.yaml"),
        ("extends: mine.yaml", [], "mine.yaml:3: extends='mine.yaml': it extends another recipe itself; one level"),
        ("job: [1]", [], "mine.yaml:3: job"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_line_and_the_nearest_valid_name(
    recipe: Path, text: str, words: list[str], part: str
) -> None:
    refused = refusal(SpecError, load_recipe, file_with(recipe, f"{HEAD}{text}\n"), words)
    assert part in refused
    if "the nearest of" in part:
        assert refused.rpartition(" are ")[2].count(", ") == 4, "five names"


def test_every_section_is_checked_before_giving_up(recipe: Path) -> None:
    text = refusal(SpecError, load_recipe, file_with(recipe, "modle: x\ncluster: 8xH1000\njob: {seq_length: -1}\n"))
    assert all(part in text for part in ("modle: unknown key", "model: is required", "H1000", "seq_length=-1"))


def test_extends_lays_over_one_level(tmp_path: Path, recipe: Path) -> None:
    """Null takes a key of the base away. A length takes the place of whichever the base has."""
    recipe.write_text(f"{HEAD}job: {{seq_length: 4096, grad_clip: 2.0, epochs: 2}}\nrun: {{data: {{train: x}}}}\n")
    child = file_with(
        tmp_path / "child.yaml", "extends: mine.yaml\nlayout: {tp: 2}\njob: {seq_length: 8192, grad_clip: null}\n"
    )
    loaded = load_recipe(child, ["job.grad_clip=3"])
    assert (loaded.model.name, loaded.job.seq_length, loaded.job.grad_clip) == ("llama-3.1-8b", 8192, 3.0)
    assert merged_text(child) == (
        f"{HEAD}job:\n  seq_length: 8192\n  epochs: 2\nrun:\n  data:\n    train: x\nlayout:\n  tp: 2\n"
    )
    assert "epochs" not in merged_text(file_with(child, "extends: mine.yaml\nrun: {steps: 7}\n"))
    assert load_recipe(child, ["job.total_tokens=5"]).job.total_tokens == 5


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "none.yaml: cannot be read: No such file" in refusal(SpecError, load_recipe, tmp_path / "none.yaml")


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_recipes_load_and_match_the_schema(file: Path, schema: jsonschema.Draft202012Validator) -> None:
    load_recipe(file)
    schema.validate(strict_yaml.read(file).data)
    schema.validate(strict_yaml.parse_text(merged_text(file), file.name).data)


def test_recipes_that_come_with_kit(tmp_path: Path) -> None:
    names = shipped.recipe_names()
    assert list(names) == sorted(file.stem for file in SHIPPED)
    assert shipped.recipe_path(f"{names[0]}.yaml") == shipped.recipe_path(names[0]) == SHIPPED[0]
    said = refusal(SpecError, shipped.recipe_path, f"{names[0]}x")
    assert f"recipe '{names[0]}x' does not come with kit; did you mean " in said
    (tmp_path / "a.yaml").write_text("# One\n#  and two\nmodel: x\n# no head\n")
    assert shipped.headline(tmp_path / "a.yaml") == "One and two"
    assert [each.purpose for each in shipped.shipped_recipes()] == [
        *map(shipped.headline, map(shipped.recipe_path, names))
    ]
    assert [path and path.name for path in map(shipped.example_script, (DPO, TINY))] == ["trl_dpo.py", None]


def test_the_schema_refuses_what_is_unknown(schema: jsonschema.Draft202012Validator) -> None:
    for wrong in (
        {"job": {"seq_lenght": 1}},
        {"run": {"steps": "x"}},
        {"cluster": {"gpu": 7}},
        {"cluster": {"gpus": 7}},
    ):
        refusal(jsonschema.ValidationError, schema.validate, {"model": "m", "cluster": "c", **wrong})
    schema.validate(
        {"extends": "a", "cluster": {"node": "p5.48xlarge", "gpu": "H200"}, "run": {"data": {"validation": "v"}}}
    )
    said = json_schema()
    assert "description" in said["properties"]["model"]
    assert said["$defs"]["Pins"]["properties"]["tiled_mlp"]["description"].startswith("Hugging Face models: each MLP")


def test_pins_are_the_fields_of_a_layout() -> None:
    """Same names, order and limits; every one may be left out, and two follow from the others."""
    of_layout = [field.name for field in dataclasses.fields(Layout)]
    follow = ("dp", "gradient_accumulation_steps")
    assert [field.name for field in dataclasses.fields(Pins)] == [name for name in of_layout if name not in follow]
    assert dataclasses.astuple(Pins()) == (None,) * (len(of_layout) - len(follow))
    for wrong in ({"tp": 0}, {"zero_stage": 4}, {"optimizer_offload_fraction": 1.5}, {"recompute": "some"}, {"dp": 2}):
        refusal((ValidationError, SpecError), Pins, **wrong)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pins(tp=2).tp = 4


def test_an_inline_cluster_starts_from_a_node_as_a_file_does(recipe: Path) -> None:
    described = "node: p5.48xlarge\nnum_nodes: 2\nprice_per_node_hour_usd: 40\n"
    recipe.write_text("model: llama-3.2-1b\ncluster:\n" + "".join(f"  {line}\n" for line in described.splitlines()))
    assert load_recipe(recipe).cluster == parse_cluster(str(file_with(recipe.with_name("cluster.yaml"), described)))
    recipe.write_text("model: llama-3.2-1b\ncluster:\n  node: p5.49xlarge\n")
    assert re.search(r"mine.yaml:3: cluster.node: .*did you mean p5.48xlarge", refusal(SpecError, load_recipe, recipe))


# A configuration of another program is no recipe: kit says whose it is, and what it can do with it.

AXOLOTL = "base_model: NousResearch/Llama-3.2-1B\ndatasets: [{path: a/b, type: alpaca}]\nmicro_batch_size: 2\n"
OTHERS = {
    AXOLOTL: ("axolotl", "kit plan llama-3.2-1b --gpus 8xH100"),
    f"{AXOLOTL}deepspeed: deepspeed_configs/zero3.json\n": ("axolotl", "kit lint deepspeed_configs/zero3.json judges"),
    "model_name_or_path: meta-llama/Llama-3.1-8B-Instruct\nstage: sft\n": ("LLaMA-Factory", "kit plan llama-3.1-8b "),
    "model_name_or_path: gpt2\nlearning_rate: 1.0e-4\n": ("TRL or the Hugging Face Trainer", "kit plan gpt2 --gpus"),
    "distributed_type: FSDP\nnum_processes: 2\n": ("accelerate", "kit lint FILE judges it"),
    "model: Qwen/Qwen3-8B\ntrain_type: lora\n": ("ms-swift", "kit plan qwen3-8b --gpus"),
    "apiVersion: batch/v1\nkind: Job\n": ("Kubernetes", "kit lint FILE judges it"),
    "optimizer_name: adam\nepoch_count: 3\n": ("no program that kit knows has these keys", "kit plan llama-3.1-8b"),
}


@pytest.mark.parametrize("text", OTHERS)
def test_the_program_is_named_with_a_command_that_works(text: str, tmp_path: Path) -> None:
    path = file_with(tmp_path / "other.yaml", text)
    refused = refusal(SpecError, load_recipe, path)
    assert "other.yaml: no recipe: " in refused
    assert [words for words in OTHERS[text] if words.replace("FILE", str(path)) not in refused] == [], refused


@pytest.mark.parametrize("text", ["modle: gpt2\nclustr: 8xH100\n", "model: gpt2\n", "cluster: 8xH100\n", "{}"])
def test_a_recipe_with_mistakes_stays_a_recipe(text: str, tmp_path: Path) -> None:
    assert "is required and missing" in refusal(SpecError, load_recipe, file_with(tmp_path / "mine.yaml", text))


@pytest.mark.parametrize(
    ("keys", "program"),
    [
        ("tokenizer model", "torchtune"), ("tokenizer", ""), ("apiVersion", ""), ("base_model cluster", ""),
        ("zero_optimization", "DeepSpeed"), ("model trainer", "NeMo"), ("pipe-parallel-size", "GPT-NeoX"),
        ("actor_rollout_ref", "verl"), ("model_name_or_path template", "LLaMA-Factory"), ("model job", ""),
    ],
)  # fmt: skip
def test_a_program_is_known_by_its_keys(keys: str, program: str) -> None:
    assert program_of(dict.fromkeys(keys.split())) == program
