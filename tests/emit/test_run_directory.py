"""Contract 1: the run directory is the only road, and what the plan decides cannot be changed behind its back."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.emit.run_directory import RunDirectory, write
from kit.errors import KitError, RunDirectoryError, SpecError
from kit.specs import strict_yaml
from kit.specs.recipe import load_recipe
from kit.specs.run import DataSpec, RunSpec, ScheduleSpec, StreamSpec
from tests.emit.plans import DENSE, FSDP2, MEGATRON, ZERO2, ZERO3, plan_of
from tests.support.files import file_with, files_in, replace_in
from tests.support.hostile import changed, spoil
from tests.support.refusals import refusal

RUN = RunSpec(data=DataSpec(train="/data/train"), schedule=ScheduleSpec(warmup_steps=2000))
SMALL = {"model": "llama-3.2-1b"}
PLANS = {
    "torch": FSDP2 | SMALL,
    "deepspeed": ZERO3 | SMALL,
    "megatron": DENSE | SMALL | {"dp": 1},
    "zero over megatron": ZERO2 | SMALL | {"dp": 2, "tp": 4, "implementation": "local"},
    "torch of two nodes": FSDP2 | SMALL | {"dp": 16, "cluster": "hgx-h100:2"},
    "deepspeed of two nodes": ZERO2 | SMALL | {"dp": 16, "cluster": "hgx-h100:2"},
}
SCRIPTS = {"accelerate.yaml", "own_script.py"}
ZEROS = {"ds_config.json", "ds_config.md", "accelerate.yaml"}
SEVERAL = {"hostfile", "launch_hosts.sh", "launch_elastic.sh"}
TRAINERS = {"ds_config.trainer.json", "ds_config.own_optimizer.json", "accelerate.own_optimizer.yaml"}
FILES = {
    "torch": SCRIPTS,
    "deepspeed": SCRIPTS | ZEROS | TRAINERS,
    "megatron": {"megatron.yaml", "pretrain_gpt.sh"},
    "zero over megatron": ZEROS | {"megatron.yaml"},
    "torch of two nodes": SCRIPTS | SEVERAL,
    "deepspeed of two nodes": SCRIPTS | ZEROS | TRAINERS | SEVERAL | {".deepspeed_env", "rank.py"},
}
"""Beside those of every plan."""


@pytest.fixture(params=["torch", "deepspeed", "megatron"])
def rundir(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    return write(plan_of(**PLANS[request.param]), RUN, tmp_path / "run")


def resealed(path: Path, name: str, text: str) -> None:
    """A file with another text, and the hash that fits it."""
    (path / name).write_text(text)
    spoil(path / "manifest.json", ("files", name), hashlib.sha256(text.encode()).hexdigest())


def edit(file: Path, path: tuple[str, ...], value: object) -> None:
    """Change one value of a JSON or YAML file in place."""
    text, is_json = file.read_text(), file.suffix == ".json"
    data = json.loads(text) if is_json else strict_yaml.parse_text(text, file.name).data
    new = changed(data, path, value)
    assert new != data, "the edit must change something"
    file.write_text(json.dumps(new) if is_json else strict_yaml.dump(new))


def memory_with(rundir: RunDirectory, *path: str, value: object) -> str:
    """What the run directory says of its memory after an edit of ``ds_config.json``."""
    edit(rundir.path / "ds_config.json", path, value)
    return RunDirectory.open(rundir.path).memory_after_edits()


@pytest.mark.parametrize("kind", PLANS)
def test_what_was_written_is_what_is_read(kind: str, tmp_path: Path) -> None:
    plan = plan_of(**PLANS[kind])
    made = write(plan, RUN, tmp_path / "run")
    again, files = RunDirectory.open(made.path), {path.name for path in made.path.iterdir()}
    assert (again.plan.digest, again.run, again.edits) == (plan.digest, RUN, ())
    assert files - FILES[kind] == {"plan.yaml", "run.yaml", "manifest.json", "launch.sh", "slurm.sbatch", "README.md"}
    keys = ("train_batch_size" in again.settings, *(key in again.megatron for key in ("parallel_state", "optimizer")))
    assert keys == ("ds_config.json" in files, "megatron.yaml" in files, kind == "megatron")
    assert (again.settings == again.megatron) == ("ds_config.json" not in files)
    script = made.path / "launch.sh"
    assert ("GLOO_SOCKET_IFNAME" in script.read_text()) == kind.endswith("two nodes")
    assert script.stat().st_mode & 0o111


def test_an_existing_directory_is_not_overwritten(rundir: RunDirectory) -> None:
    before = {p.name: p.read_bytes() for p in rundir.path.iterdir()}
    for name in ("run2", "file"):
        (rundir.path.parent / name).mkdir() if name == "run2" else (rundir.path.parent / name).touch()
    ways = rf"exists already and is not overwritten; use --out {rundir.path}3, .*kit train {rundir.path} --resume auto"
    for place, said in (
        (rundir.path, ways),
        (rundir.path.parent / "file" / "run", "^run cannot be written: Not a directory; make room"),
    ):
        assert re.search(said, refusal(RunDirectoryError, write, rundir.plan, RUN, place))
    assert {p.name: p.read_bytes() for p in rundir.path.iterdir()} == before


@pytest.mark.parametrize(
    ("engine", "file", "path", "value", "recipe_key"),
    [
        ("deepspeed", "ds_config.json", ("train_batch_size",), 1024, "job.global_batch_size"),
        ("deepspeed", "ds_config.json", ("train_micro_batch_size_per_gpu",), 32, "layout.micro_batch_size"),
        ("deepspeed", "ds_config.json", ("zero_optimization", "stage"), 0, "layout.zero_stage"),
        ("deepspeed", "ds_config.json", ("fp16",), {"enabled": True}, "job.precision"),
        ("deepspeed", "ds_config.json", ("sequence_parallel_size",), 2, "layout.cp"),
        ("deepspeed", "ds_config.json", ("tensor_parallel",), {"autotp_size": 2}, "layout.tp"),
        ("deepspeed", "accelerate.yaml", ("num_processes",), 4, "cluster"),
        ("megatron", "megatron.yaml", ("parallel_state", "tensor_model_parallel_size"), 16, "layout.tp"),
        ("megatron", "megatron.yaml", ("parallel_state", "pipeline_model_parallel_size"), 16, "layout.pp"),
    ],
)
def test_an_edit_of_what_the_plan_decides_is_refused(
    tmp_path: Path, engine: str, file: str, path: tuple[str, ...], value: object, recipe_key: str
) -> None:
    rundir = write(plan_of(**PLANS[engine]), RUN, tmp_path / "run")
    edit(rundir.path / file, path, value)
    found = next(iter(value.values())) if isinstance(value, dict) else value
    said = rf"^run/{file}: {'.'.join(path)}\S*: .* was planned, the file has {found}; change {recipe_key} in the recipe"
    assert re.search(said, refusal(RunDirectoryError, RunDirectory.open, rundir.path))


def test_any_other_edit_is_honoured_and_recorded(tmp_path: Path) -> None:
    path = write(plan_of(**PLANS["deepspeed"]), RUN, tmp_path / "run").path
    config = json.loads((path / "ds_config.json").read_text()) | {"steps_per_print": 7, "dump_state": True}
    del config["wall_clock_breakdown"]
    accelerate = (path / "accelerate.yaml").read_text()
    edited = {"launch.sh": "mine", "ds_config.md": "mine", "accelerate.yaml": f"# mine\n{accelerate}"}
    files_in(path, edited | {"ds_config.json": json.dumps(config)})
    again = RunDirectory.open(path)
    assert again.settings["steps_per_print"] == 7
    expected = [
        ("ds_config.json", "wall_clock_breakdown", False, None),
        ("ds_config.json", "steps_per_print", None, 7),
        ("ds_config.json", "dump_state", None, True),
        ("ds_config.md", "(text)", "as emitted", "edited"),
        ("launch.sh", "(text)", "as emitted", "edited"),
    ]
    assert [(e.file, e.key, e.planned, e.found) for e in again.edits] == expected
    again.record_edits()
    assert [tuple(row.values()) for row in json.loads((path / "edits.json").read_text())] == expected


def test_a_file_that_the_manifest_does_not_name_is_an_edit_where_kit_would_write_one(tmp_path: Path) -> None:
    """One that a later kit writes is not missed in an old directory; one of a target that was not asked for, or of
    another kind of plan, is not looked at."""
    rundir = write(plan_of(**PLANS["torch"]), RUN, tmp_path / "run")
    spoil(rundir.path / "manifest.json", ("files", "slurm.sbatch"), ...)
    for name in ("slurm.sbatch", "sky.yaml", "ds_config.json", "launch_hosts.sh"):
        (rundir.path / name).write_text("mine")
        assert [edit.file for edit in RunDirectory.open(rundir.path).edits] == ["slurm.sbatch"]
    (rundir.path / "slurm.sbatch").unlink()
    assert RunDirectory.open(rundir.path).edits == ()


def test_an_edited_buffer_moves_the_memory_prediction(tmp_path: Path) -> None:
    rundir = write(plan_of(**ZERO3, reduce_bucket_size=2**26), RUN, tmp_path / "run")
    peak, bucket = rundir.plan.predicted.peak_gib, ("zero_optimization", "reduce_bucket_size")
    assert rundir.memory_after_edits() == memory_with(rundir, "steps_per_print", value=7) == ""
    for size, more in ((2**26 + 2**30, 2.0), (2**26 + 2**31, 4.0)):  # stage 3 keeps one bucket, here of bf16
        assert memory_with(rundir, *bucket, value=size) == (
            f"with the edits of ds_config.json: {peak + more:.1f} GiB per GPU ({peak:.1f} planned, 75.1 usable)"
        )
    assert memory_with(rundir, *bucket, value=2**36).endswith("75.1 usable); it does not fit")
    assert [memory_with(rundir, *bucket, value=nothing) for nothing in ("x", -1, 1e999)] == ["", "", ""]
    assert "GiB per GPU" in memory_with(rundir, *bucket, value=0)


def test_edited_buffers_that_need_more_of_the_host_say_so(tmp_path: Path) -> None:
    run = RunSpec(data=DataSpec(train=str(tmp_path / "rows")), nvme_path=str(tmp_path))
    plan = plan_of(**ZERO3 | SMALL, cluster="dgx-h100", offload_optimizer="nvme", sub_group_size=10**8)
    said = memory_with(write(plan, run, tmp_path / "run"), "zero_optimization", "sub_group_size", value=4 * 10**8)
    [(host, planned)] = re.findall(r", ([\d.]+) GiB of host memory per node \(([\d.]+) planned\)", said)
    assert float(host) > float(planned) == pytest.approx(plan.predicted.host_ram_gib_per_node, abs=0.06)


@pytest.mark.parametrize("home", [True, False])
def test_deepspeeds_files_have_the_disk_of_the_run_unless_it_is_somebodys(
    home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path if home else tmp_path / "home"))
    run = RunSpec(data=DataSpec(train=str(tmp_path / "rows")), nvme_path=str(tmp_path / "disk"))
    plan = plan_of(**ZERO3 | SMALL, cluster="dgx-h100", offload_optimizer="nvme", offload_param="cpu")
    made = write(plan, run, tmp_path / "run")
    assert made.edits == ()
    for name in ("ds_config.json", "ds_config.trainer.json", "ds_config.own_optimizer.json"):
        zero = json.loads((made.path / name).read_text())["zero_optimization"]
        assert [zero[part].get("nvme_path") for part in ("offload_optimizer", "offload_param")] == [
            None if home else str(tmp_path / "disk"), None,
        ]  # fmt: skip


def test_run_yaml_is_the_users_to_edit_and_the_plan_is_not(rundir: RunDirectory) -> None:
    replace_in(rundir.path / "run.yaml", "keep_last: 5", "keep_last: 2")
    again = RunDirectory.open(rundir.path)
    assert (again.run.checkpoint.keep_last, again.edits) == (2, ())
    replace_in(rundir.path / "plan.yaml", "learning_rate: 0.0003", "learning_rate: 0.0004")
    assert "plan.yaml was changed" in refusal(RunDirectoryError, RunDirectory.open, rundir.path)


DAMAGE: dict[str, tuple[str, str | None, str]] = {
    "no manifest": ("manifest.json", None, "is not a run directory"),
    "a file is gone": ("launch.sh", None, r"lacks launch\.sh, which its manifest names"),
    "half a manifest": ("manifest.json", "{", "manifest.json is damaged"),
    "a list": ("manifest.json", "[]", "manifest.json is damaged"),
    "no files": ("manifest.json", '{"format": "kit-run-directory/1"}', "manifest.json is damaged"),
    "files are a list": ("manifest.json", '{"format": "kit-run-directory/1", "files": []}', "is damaged"),
    "hashes are numbers": (
        "manifest.json",
        '{"format": "kit-run-directory/1", "files": {"plan.yaml": 1}}',
        "is damaged",
    ),
    "one hash is a number": (
        "manifest.json",
        '{"format": "kit-run-directory/1", "files": {"plan.yaml": "a", "run.yaml": 1}}',
        "is damaged",
    ),
    "another format": ("manifest.json", '{"format": "kit-run-directory/2"}', "has format .*2.*; this kit reads"),
    "half a configuration": ("ds_config.json", '{"a": 1,', r"^ds_config\.json:1: not valid JSON"),
    "a huge number": ("ds_config.json", "9" * 5000, r"^ds_config\.json: not valid JSON"),
    "a list of keys": ("ds_config.json", "[]", "holds a list where an object of keys is expected"),
    "not YAML": ("accelerate.yaml", "a: [", r"^accelerate\.yaml"),
}


@pytest.mark.parametrize(("name", "text", "said"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    """In one line."""
    rundir = write(plan_of(**PLANS["deepspeed"]), RUN, tmp_path / "run")
    (rundir.path / name).unlink()
    if text is not None:
        (rundir.path / name).write_text(text)
    [line] = refusal(RunDirectoryError, RunDirectory.open, rundir.path).splitlines()
    assert re.search(said, line)


def test_no_home_path_goes_into_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "somebody"
    monkeypatch.setenv("HOME", str(home))
    run = RunSpec(data=DataSpec(train=str(home / "data" / "train"), validation="/data/v"))
    for place, train in (
        (home / "runs" / "a", "../../data/train"),
        (tmp_path / "scratch" / "a", "~/data/train"),
    ):
        assert write(plan_of(**PLANS["torch"]), run, place).run.data.train == run.data.train
        text = (place / "run.yaml").read_text()
        assert [part in text for part in (f"train: {train}\n", "validation: ../../", "somebody")] == [True, True, False]


def test_a_home_that_nobody_has_is_named(rundir: RunDirectory, tmp_path: Path) -> None:
    """Python's own answer is a RuntimeError without the key."""
    recipe = file_with(
        tmp_path / "recipe.yaml", "model: llama-3.2-1b\ncluster: 8xH100\nrun: {data: {train: ~nobody-here/x}}\n"
    )
    replace_in(rundir.path / "run.yaml", "  train: ", "  train: ~nobody-here/x #")
    said = "run.data.train=~nobody-here/x: this machine knows no home directory"
    assert said in refusal(SpecError, load_recipe, recipe)
    assert said in refusal(SpecError, RunDirectory.open, rundir.path)


STREAM = StreamSpec(path="json", data_files=("a",), tokenizer="b")


def test_data_and_plan_go_together(tmp_path: Path) -> None:
    """A script of your own needs no data, and gets no file of kit's own loop; a plan that only that loop runs needs it.
    Only text is streamed."""
    made = write(plan_of(**PLANS["deepspeed"]), RunSpec(), tmp_path / "run").path
    own = {"own_script.py", "accelerate.yaml", "ds_config.trainer.json", "README.md"}
    assert {path.name for path in made.iterdir()} & (own | {"launch.sh", "slurm.sbatch"}) == own
    page = (made / "README.md").read_text()
    assert ("needs data (`run.data.train` in the recipe)" in page, "launch.sh" in page) == (True, False)
    assert RunDirectory.open(made).edits == ()
    assert "run.data.train is missing" in refusal(KitError, kit.train, made)
    said = refusal(KitError, write, plan_of(**PLANS["deepspeed"]), RunSpec(), made)
    assert said.endswith("remove it yourself")  # no kit train, which has nothing to train on
    assert (write(plan_of(**PLANS["megatron"]), RunSpec(), tmp_path / "gpt").path / "pretrain_gpt.sh").is_file()
    sft: dict[str, Any] = {"job": {"objective": "sft", "total_tokens": 10**8}}
    for plan, run, said in (
        (DENSE | sft, RunSpec(), "run.data.train is required and missing: only kit's own loop runs megatron"),
        (FSDP2 | sft, RunSpec(data=DataSpec(stream=STREAM)), "run.data.stream with job.objective=sft: only text"),
    ):
        assert refusal(SpecError, write, plan_of(**plan), run, tmp_path / "none").startswith(said)
    assert not (tmp_path / "none").exists()
    write(plan_of(**FSDP2), RunSpec(steps=5, data=DataSpec(stream=STREAM)), tmp_path / "streamed")
    write(plan_of(**MEGATRON | {"dp": 8}, job=sft["job"]), RunSpec(), tmp_path / "targets", ["k8s"])
