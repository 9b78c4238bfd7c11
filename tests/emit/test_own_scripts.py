"""Files and commands for scripts that know nothing of kit: what the README prints is run, and nothing of a plan is lost
in silence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import kit
from kit.emit import own_script
from kit.emit.generated import shipped_plan
from kit.emit.not_carried import flags
from kit.emit.readme import readme
from kit.emit.run_directory import RunDirectory, files_of, write
from kit.errors import KitError, SpecError
from kit.planner.plan import Plan
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Pins
from kit.specs.run import DataSpec, RunSpec
from kit.specs.shipped import recipe_names
from tests.emit.plans import TORCH as ON_TORCH
from tests.emit.plans import plan_of
from tests.system.examples.cases import EXAMPLES, TIME_LIMIT_S, start
from tests.system.examples.inputs import BLOCK, plan_for, prepare

QLORA = LoraSpec(rank=4, alpha=12, target_modules=("q_proj", "v_proj"), four_bit=True)


def test_a_script_of_your_own_needs_no_data(tmp_path: Path) -> None:
    plan = kit.plan("llama-3.2-1b", "8xH100", pins=Pins(engine="deepspeed", zero_stage=2, implementation="huggingface"))
    made = write(plan, RunSpec(), tmp_path / "run").path
    names = {path.name for path in made.iterdir()}
    assert {"own_script.py", "accelerate.yaml", "ds_config.trainer.json", "README.md"} <= names
    assert not names & {"launch.sh", "slurm.sbatch"}
    assert "launch.sh" not in (made / "README.md").read_text()
    assert RunDirectory.open(made).edits == ()
    with pytest.raises(KitError, match=r"run\.data\.train is missing"):
        kit.train(made)
    with pytest.raises(KitError, match=r"remove it yourself$"):  # no kit train, which has nothing to train on
        write(plan, RunSpec(), made)


def test_a_plan_that_only_kits_loop_runs_asks_for_data(tmp_path: Path) -> None:
    plan = kit.plan(
        "llama-3.1-8b", "8xH100", JobSpec(objective="sft", global_batch_size=64, epochs=3.0), Pins(engine="megatron")
    )
    with pytest.raises(SpecError, match=r"run\.data\.train is required and missing: only kit's own loop runs megatron"):
        write(plan, RunSpec(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


TORCH = """
import os
class Group:
    __del__ = lambda self: os.abort()  # as a thread of gloo's may while Python finalises
group = Group()
is_initialized = lambda: True
destroy_process_group = lambda: print("group left")
"""
STAND_INS = {
    "torch/__init__.py": "import os\nclass cuda:\n    device_count = lambda: int(os.environ['GPUS'])\n",
    "torch/distributed.py": TORCH,
    "accelerate/__init__.py": "",
    "accelerate/state.py": "class PartialState:\n    _prepare_backend = None\n",
    "accelerate/utils.py": "class DistributedType: MULTI_GPU = MULTI_CPU = None\n",
}


def ended(place: Path, cluster: str, script: str, **given: str) -> subprocess.CompletedProcess[str]:
    """``own_script.py`` with a script, beside stand-ins for torch and accelerate."""
    plan = plan_of(cluster=cluster, **ON_TORCH, dp=int(cluster[0]))
    for name, text in {**STAND_INS, "own_script.py": own_script.text(plan), "work/train.py": script}.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    words = [sys.executable, "own_script.py", *["work/train.py", "--x"] * bool(script)]
    return subprocess.run(words, cwd=place, env=os.environ | given, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("cluster", "script", "given", "said"),
    [
        ("2xA100-40", "train", {"GPUS": "0", "LOCAL_WORLD_SIZE": "2"}, "torch sees 0 of 2 of this node"),
        ("2xA100-40", "train", {"GPUS": "1", "LOCAL_WORLD_SIZE": "2"}, "torch sees 1 of 2 of this node"),
        ("2xA100-40", "train", {"GPUS": "2", "WORLD_SIZE": "1"}, "WORLD_SIZE is 1 and the plan has 2 processes"),
        ("2xcpu", "train", {"WORLD_SIZE": "1"}, "WORLD_SIZE is 1 and the plan has 2 processes"),
        ("2xcpu", "", {}, "no script is named"),
    ],
)
def test_ranks_that_would_train_apart_end_with_an_error(
    cluster: str, script: str, given: dict[str, str], said: str, tmp_path: Path
) -> None:
    """accelerate starts one run of one process for each rank where there is no GPU, and exits with 0."""
    done = ended(tmp_path, cluster, script and "print('trained')", **{"WORLD_SIZE": "2"} | given)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


ENDS = {
    "": (0, ""),
    "sys.exit()": (0, ""),
    "sys.exit(3)": (3, ""),
    "sys.exit(256 + 7)": (7, ""),
    "sys.exit('no data')": (1, "no data\n"),
    "raise ValueError('planted')": (1, "ValueError: planted\n"),
}
SCRIPT = """
import atexit, os, sys
atexit.register(print, "trackers closed,", end=" ")
print(sys.argv[1], os.path.basename(sys.path[0]), __name__, end=", ")
"""


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_on_cpus_leaves_with_its_own_code_and_words(end: str, tmp_path: Path) -> None:
    """After all that libraries do at exit, and without finalising Python, which gloo's threads can turn into an abort
    of a run that is done."""
    code, said = ENDS[end]
    done = ended(tmp_path, "2xcpu", SCRIPT + end, WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (code, "--x work __main__, trackers closed, group left\n")
    assert done.stderr.endswith(said) if said else done.stderr == ""
    assert ended(tmp_path, "2xA100-40", SCRIPT + end, WORLD_SIZE="2", GPUS="2").returncode == code


SFT = {
    "ZeRO-3": Pins(engine="deepspeed", zero_stage=3),
    "FSDP2": Pins(engine="torch", zero_stage=3),
    "DDP": Pins(engine="torch", zero_stage=0),
}


def commands(text: str) -> list[str]:
    return re.findall(r"^(?:accelerate|deepspeed) .*", text, re.MULTILINE)


def test_every_layout_prints_these_commands() -> None:
    """So that the cases below are all of them."""
    directory = prepare()
    counts = {name: len(commands(readme(plan_for(directory / "model", p, objective="sft")))) for name, p in SFT.items()}
    assert counts == {"ZeRO-3": 5, "FSDP2": 3, "DDP": 3}


@pytest.mark.everyday("ZeRO-3-0")
@pytest.mark.parametrize(("layout", "number"), [("ZeRO-3", n) for n in range(5)] + [("FSDP2", n) for n in range(3)])
def test_a_command_of_the_readme_trains_the_plan_on_cpu_processes(layout: str, number: int, tmp_path: Path) -> None:
    directory = prepare()
    four_bit = layout == "FSDP2"
    plan = plan_for(directory / "model", SFT[layout], objective="sft", lora=replace(QLORA, four_bit=four_bit))
    place = write(plan, RunSpec(), tmp_path / "run").path
    command = commands((place / "README.md").read_text())[number]
    inputs = f"--model {directory / 'model'} --text {directory / 'text.txt'} --block {BLOCK}"
    trainer = "--output_dir out --max_steps 2 --logging_steps 1 --report_to none --save_steps 1 --disable_tqdm true"
    if "trl_sft.py" in command:
        chats = f"--model {directory / 'model'} --chats {directory / 'chats.jsonl'} {trainer}"
        command = command.replace("trl_sft.py", f"{EXAMPLES / 'trl_sft.py'}").replace("--model DIR …", chats)
    elif "--adam_beta1" in command:
        command = command.replace("SCRIPT", f"{EXAMPLES / 'trainer.py'} {inputs} {trainer}")
    else:
        command = command.replace("SCRIPT", f"{EXAMPLES / 'accelerate_loop.py'} {inputs} --steps 2")
    scripts = Path(sys.executable).parent
    done = start(["bash", "-c", f"PATH={scripts}:$PATH exec {command}"], place, TIME_LIMIT_S)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    facts = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"engine"')))
    assert facts["engine"].startswith({"ZeRO-3": "DeepSpeedEngine", "FSDP2": "FSDP"}[layout])
    assert (facts["zero_stage"], facts["processes"], len(facts["losses"])) == (3 if layout == "ZeRO-3" else None, 2, 2)
    if "trl_sft.py" in command and layout == "ZeRO-3":
        saved = json.loads((place / "out/checkpoint-2/adapter_config.json").read_text())
        found = (saved["r"], saved["lora_alpha"], saved["lora_dropout"], sorted(saved["target_modules"]))
        assert found == (4, 12, 0.0, ["q_proj", "v_proj"])


def sections(plan: Plan) -> list[str]:
    """Sections of the README that start a script that is not kit's."""
    found = re.split(r"^## ", readme(plan), flags=re.MULTILINE)
    return [text for text in found if commands(text)]


PROMISES = {
    "chunked_loss": "chunked loss",
    "compile_layers": "compiled blocks",
    "tiled_mlp": "tiled MLP",
    "activation_offloading": "saved layer inputs on host",
    "attention_kernel": "attention",
}
"""Flag of a layout that no file or argument of accelerate, the Trainer or DeepSpeed has → its words in a plan."""


def check_nothing_is_lost(plan: Plan) -> int:
    layout, lora, files = plan.layout, plan.job.lora, files_of(plan)
    for text in sections(plan):
        trl = text.startswith("TRL's")
        for name, words in PROMISES.items():
            if getattr(layout, name) not in (False, "default") and not (trl and name == "chunked_loss"):
                assert words in text, (name, text)
        if layout.recompute == "full":
            by_file = "fsdp_activation_checkpointing: true" in files["accelerate.yaml"]
            assert by_file != ("--gradient_checkpointing true" in text or "full recompute" in text), text
        if lora is not None and trl:
            assert f"--use_peft true --lora_r {lora.rank} --lora_alpha {round(lora.alpha)} " in text
            assert ("--load_in_4bit true" in text) == lora.four_bit
        elif lora is not None:
            assert ("4-bit weights and adapters" if lora.four_bit else "adapters (job.lora") in text
            assert f"LoraConfig(r={lora.rank}, lora_alpha={lora.alpha}" in readme(plan)
            assert ("load_in_4bit=True" in readme(plan)) == lora.four_bit
        if plan.job.precision == "fp8":
            assert "fp8" in text
            assert "--fp8" not in text
    return len(sections(plan))


def test_no_promise_of_a_shipped_recipe_is_lost() -> None:
    plans = [plan for name in recipe_names() if (plan := shipped_plan(name)) is not None]
    assert sum(map(check_nothing_is_lost, plans)) > 40


@pytest.mark.parametrize(
    ("pins", "job"),
    [
        (Pins(engine="torch", zero_stage=3, recompute="full", activation_offloading=True, tiled_mlp=True), {}),
        (Pins(engine="torch", zero_stage=0, recompute="full", chunked_loss=True, compile_layers=True), {}),
        (Pins(engine="deepspeed", zero_stage=3, recompute="full", chunked_loss=True, tiled_mlp=True), {}),
        (Pins(engine="torch", zero_stage=3, attention_kernel="cudnn"), {}),
        (Pins(engine="torch", zero_stage=3), {"precision": "fp8"}),
        (Pins(engine="torch", zero_stage=3), {"objective": "sft", "lora": QLORA}),
        (Pins(engine="deepspeed", zero_stage=2), {"objective": "sft", "lora": replace(QLORA, four_bit=False)}),
    ],
)
def test_no_promise_of_a_pinned_plan_is_lost(pins: Pins, job: dict[str, object]) -> None:
    plan = kit.plan("llama-3.2-1b", "8xH100", JobSpec(**{"global_batch_size": 64, **job}), pins.but(tp=1, cp=1))
    assert check_nothing_is_lost(plan) >= 2


def test_memory_without_what_a_script_does_not_get_is_told() -> None:
    """Without chunks the logits of two sequences of 4,096 tokens and 128,256 words are there at once, in bf16 and fp32
    with gradients: 8,192 x 128,256 x (2 + 4 + 2) bytes are 7.8 GiB more at least."""
    pins = Pins(engine="torch", zero_stage=3, chunked_loss=True, micro_batch_size=2, tp=1, cp=1, compile_layers=False)
    plan = kit.plan("llama-3.2-1b", "8xH100", JobSpec(global_batch_size=64), pins)
    without, given = map(float, re.search(r"needs ([\d.]+) GiB .* with it (\d+\.\d+)", readme(plan)).groups())  # type: ignore[union-attr]
    assert given == pytest.approx(plan.predicted.peak_gib, abs=0.06)
    assert without > given + 7.8
    assert flags(plan, trainer=True) == ["chunked_loss"]
    assert flags(plan, trainer=True, trl=True) == []


def test_several_nodes_are_started_in_every_way(tmp_path: Path) -> None:
    plan = kit.plan("llama-3.2-1b", "2x8xH100", pins=Pins(engine="torch", zero_stage=3, tp=1, cp=1))
    text = (write(plan, RunSpec(data=DataSpec(train="/data/train")), tmp_path / "run").path / "README.md").read_text()
    for way in ("sbatch slurm.sbatch", "`hostfile`", "./launch_hosts.sh", "./launch_elastic.sh"):
        assert way in text
    assert commands(text)
    for command in commands(text):
        assert '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" own_script.py' in command


def test_a_layout_that_accelerate_has_no_file_for_says_so() -> None:
    plan = kit.plan("llama-2-13b", "16xH100", pins=Pins(engine="torch", tp=2, zero_stage=3))
    assert "own_script.py" not in files_of(plan)
    assert "There is no file for your own accelerate script" in readme(plan)
