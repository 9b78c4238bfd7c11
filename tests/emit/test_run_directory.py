"""Contract 1: the run directory is the only road, and what the plan decides cannot be changed behind its back."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

import kit
from kit.emit.readme import readme
from kit.emit.run_directory import RunDirectory, files_of, write
from kit.errors import RunDirectoryError, SpecError
from kit.specs import strict_yaml
from kit.specs.layout import ZERO_KEYS
from kit.specs.recipe import load_recipe
from kit.specs.run import DataSpec, RunSpec

RUN = RunSpec(data=DataSpec(train="/data/train"))
ENGINES = ["torch", "deepspeed", "megatron"]


def plan_for(engine: str, gpus: str = "8xH100", model: str = "llama-3.2-1b") -> kit.Plan:
    layers = "huggingface" if engine == "deepspeed" else None  # ZeRO over Megatron has other files
    return kit.plan(model, gpus, pins=kit.Pins(engine=engine, implementation=layers))


@pytest.fixture(params=ENGINES)
def rundir(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    return write(plan_for(request.param), RUN, tmp_path / "run")


def test_what_was_written_is_what_is_read(rundir: RunDirectory) -> None:
    again = RunDirectory.open(rundir.path)
    assert again.plan == plan_for(rundir.plan.layout.engine)
    assert again.run == RUN
    assert again.edits == ()


def test_each_engine_gets_its_files(rundir: RunDirectory) -> None:
    always = {"plan.yaml", "run.yaml", "manifest.json", "launch.sh", "slurm.sbatch", "README.md"}
    scripts = {"accelerate.yaml", "own_script.py"}
    deepspeed = scripts | {"ds_config.json", "ds_config.md", "ds_config.trainer.json"}
    deepspeed |= {"ds_config.own_optimizer.json", "accelerate.own_optimizer.yaml"}
    own = {"torch": scripts, "deepspeed": deepspeed, "megatron": {"megatron.yaml", "pretrain_gpt.sh"}}
    assert {p.name for p in rundir.path.iterdir()} == always | own[rundir.plan.layout.engine]
    assert bool(rundir.settings) == (rundir.plan.layout.engine != "torch")


def test_several_nodes_get_a_hostfile() -> None:
    files = files_of(plan_for("megatron", "64xA100-80", "llama-3-70b"))
    assert files["hostfile"].count(" slots=8\n") == 8
    assert '--node-rank "$NODE_RANK"' in files["launch.sh"]


def test_emission_is_deterministic(rundir: RunDirectory) -> None:
    assert files_of(rundir.plan) == files_of(rundir.plan)


def test_an_existing_directory_is_not_overwritten(rundir: RunDirectory) -> None:
    before = {p.name: p.read_bytes() for p in rundir.path.iterdir()}
    (rundir.path.parent / "run2").mkdir()
    ways = rf"exists already and is not overwritten; use --out {rundir.path}3, .*kit train {rundir.path} --resume auto"
    with pytest.raises(RunDirectoryError, match=ways):
        write(rundir.plan, RUN, rundir.path)
    assert {p.name: p.read_bytes() for p in rundir.path.iterdir()} == before


@pytest.mark.parametrize(
    ("engine", "file", "path", "value", "recipe_key"),
    [
        ("deepspeed", "ds_config.json", ("train_batch_size",), 1024, "job.global_batch_size"),
        ("deepspeed", "ds_config.json", ("train_micro_batch_size_per_gpu",), 32, "layout.micro_batch_size"),
        ("deepspeed", "ds_config.json", ("zero_optimization", "stage"), 0, "layout.zero_stage"),
        ("deepspeed", "accelerate.yaml", ("num_processes",), 4, "cluster"),
        ("megatron", "megatron.yaml", ("parallel_state", "tensor_model_parallel_size"), 16, "layout.tp"),
        ("megatron", "megatron.yaml", ("parallel_state", "pipeline_model_parallel_size"), 16, "layout.pp"),
    ],
)
def test_an_edit_of_what_the_plan_decides_is_refused(
    tmp_path: Path, engine: str, file: str, path: tuple[str, ...], value: int, recipe_key: str
) -> None:
    rundir = write(plan_for(engine), RUN, tmp_path / "run")
    edit(rundir.path / file, path, value)
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.open(rundir.path)
    assert f"change {recipe_key}" in str(caught.value)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "stage", "said"),
    [
        ("deepspeed", 2, None),
        ("deepspeed", 3, "writes empty tensors"),
        ("torch", 0, None),
        ("torch", 3, "stops with an error"),
    ],
)
def test_the_readme_says_where_saving_needs_the_state_of_all_ranks(engine: str, stage: int, said: str | None) -> None:
    plan = kit.plan("llama-3.2-1b", "8xH100", pins=kit.Pins(engine=engine, zero_stage=stage))
    text = readme(plan)
    assert ("get_state_dict" in text) == (said is not None)
    assert said is None or said in text


def test_any_other_edit_is_honoured_and_recorded(tmp_path: Path) -> None:
    rundir = write(plan_for("deepspeed"), RUN, tmp_path / "run")
    edit(rundir.path / "ds_config.json", ("steps_per_print",), 7)
    edit(rundir.path / "ds_config.json", ("wall_clock_breakdown",), True)
    again = RunDirectory.open(rundir.path)
    assert again.settings["steps_per_print"] == 7
    assert {e.key for e in again.edits} == {"steps_per_print", "wall_clock_breakdown"}
    again.record_edits()
    assert len(json.loads((rundir.path / "edits.json").read_text())) == 2


def test_an_edited_bucket_moves_the_memory_prediction(tmp_path: Path) -> None:
    pins = kit.Pins(engine="deepspeed", zero_stage=3)
    rundir = write(kit.plan("llama-3.1-8b", "8xH100", pins=pins), RUN, tmp_path / "run")
    assert rundir.memory_after_edits() == ""
    edit(rundir.path / "ds_config.json", ("steps_per_print",), 7)
    assert RunDirectory.open(rundir.path).memory_after_edits() == ""
    planned = rundir.plan.layout.reduce_bucket_size
    edit(rundir.path / "ds_config.json", ("zero_optimization", "reduce_bucket_size"), planned + 2**30)
    line = RunDirectory.open(rundir.path).memory_after_edits()
    # Stage 3 keeps one bucket, here of bf16.
    peak = rundir.plan.predicted.peak_gib
    assert f"{peak + 2:.1f} GiB per GPU ({peak:.1f} planned" in line
    again = kit.plan(
        "llama-3.1-8b", "8xH100", pins=dataclasses.replace(pins, reduce_bucket_size=planned + 2**30, micro_batch_size=1)
    )
    assert again.layout.reduce_bucket_size == planned + 2**30
    assert files_of(again)["ds_config.json"].count(str(planned + 2**30)) == 1


def test_a_run_directory_of_the_former_plan_version_is_read(tmp_path: Path) -> None:
    """Version 2 had no sizes: kit chooses them as it did then, and its checkpoints' plan hash stays."""
    rundir = write(plan_for("deepspeed"), RUN, tmp_path / "run")
    plan = rundir.plan
    former = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, **dict.fromkeys(ZERO_KEYS)))
    text = former.to_yaml().replace("schema_version: 3", "schema_version: 2")
    assert "reduce_bucket_size" not in text
    (rundir.path / "plan.yaml").write_text(text)
    manifest = json.loads((rundir.path / "manifest.json").read_text())
    manifest["files"]["plan.yaml"] = hashlib.sha256(text.encode()).hexdigest()
    (rundir.path / "manifest.json").write_text(json.dumps(manifest))
    again = RunDirectory.open(rundir.path)
    assert again.edits == ()
    assert again.plan.digest == former.digest != plan.digest


def test_run_yaml_is_the_users_to_edit(rundir: RunDirectory) -> None:
    file = rundir.path / "run.yaml"
    file.write_text(file.read_text().replace("keep_last: 5", "keep_last: 2"))
    again = RunDirectory.open(rundir.path)
    assert again.run.checkpoint.keep_last == 2
    assert again.edits == ()


def test_a_changed_plan_is_refused(rundir: RunDirectory) -> None:
    file = rundir.path / "plan.yaml"
    file.write_text(file.read_text().replace("learning_rate: 0.0003", "learning_rate: 0.0004"))
    with pytest.raises(RunDirectoryError, match=r"plan\.yaml was changed"):
        RunDirectory.open(rundir.path)


def test_damage_is_named(rundir: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        RunDirectory.open(tmp_path)
    (rundir.path / "launch.sh").unlink()
    with pytest.raises(RunDirectoryError, match=r"lacks launch\.sh"):
        RunDirectory.open(rundir.path)
    (rundir.path / "manifest.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="is damaged"):
        RunDirectory.open(rundir.path)


def test_no_home_path_goes_into_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "somebody"
    monkeypatch.setenv("HOME", str(home))
    run = RunSpec(data=DataSpec(train=str(home / "data" / "train")))
    inside = write(plan_for("torch"), run, home / "runs" / "a")
    outside = write(plan_for("torch"), run, tmp_path / "scratch" / "a")
    for rundir in (inside, outside):
        assert rundir.run.data.train == run.data.train
        assert "somebody" not in (rundir.path / "run.yaml").read_text()


def test_a_home_that_nobody_has_is_named(rundir: RunDirectory, tmp_path: Path) -> None:
    """Python's own answer is a RuntimeError without the key."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: llama-3.2-1b\ncluster: 8xH100\nrun: {data: {train: ~nobody-here/x}}\n")
    file = rundir.path / "run.yaml"
    file.write_text(file.read_text().replace("train: ", "train: ~nobody-here/x #", 1))
    for read, name in ((load_recipe, recipe), (RunDirectory.open, rundir.path)):
        with pytest.raises(SpecError, match=r"run\.data\.train=~nobody-here/x: this machine knows no home directory"):
            read(name)


def edit(file: Path, path: tuple[str, ...], value: object) -> None:
    """Change one value of a JSON or YAML file in place."""
    text = file.read_text()
    data = json.loads(text) if file.suffix == ".json" else strict_yaml.parse_text(text, file.name).data
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    assert inner[path[-1]] != value, "the edit must change something"
    inner[path[-1]] = value
    file.write_text(json.dumps(data) if file.suffix == ".json" else strict_yaml.dump(data))
