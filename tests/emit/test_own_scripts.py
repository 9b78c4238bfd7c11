"""Files and commands for scripts that know nothing of kit: what the README prints is run, and nothing of a plan is lost
in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote

import pytest

from kit.emit import own_script
from kit.emit.run_directory import write
from kit.specs.job import LoraSpec
from kit.specs.layout import Pins
from kit.specs.run import RunSpec
from tests.emit.plans import TORCH as ON_TORCH
from tests.emit.plans import commands, plan_of
from tests.system.examples.cases import EXAMPLES, TIME_LIMIT_S, start
from tests.system.examples.inputs import BLOCK, plan_for, prepare

QLORA = LoraSpec(rank=4, alpha=12, target_modules=("q_proj", "v_proj"), four_bit=True)


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
}
COUNTS = {"ZeRO-3": 5, "FSDP2": 3}
"""Commands of each."""


@pytest.mark.slow
@pytest.mark.everyday("FSDP2-0")
@pytest.mark.parametrize(("layout", "number"), [(name, n) for name, count in COUNTS.items() for n in range(count)])
def test_a_command_of_the_readme_trains_the_plan_on_cpu_processes(layout: str, number: int, tmp_path: Path) -> None:
    directory = prepare()
    four_bit = layout == "FSDP2"
    plan = plan_for(directory / "model", SFT[layout], objective="sft", lora=replace(QLORA, four_bit=four_bit))
    place = write(plan, RunSpec(), tmp_path / "run").path
    printed = commands((place / "README.md").read_text())
    assert len(printed) == COUNTS[layout]
    command = printed[number]
    model, text, chats = (quote(str(directory / name)) for name in ("model", "text.txt", "chats.jsonl"))
    sft, trainer_script, loop = (quote(str(EXAMPLES / f"{n}.py")) for n in ("trl_sft", "trainer", "accelerate_loop"))
    inputs = f"--model {model} --text {text} --block {BLOCK}"
    trainer = "--output_dir out --max_steps 2 --logging_steps 1 --report_to none --save_steps 1 --disable_tqdm true"
    if "trl_sft.py" in command:
        command = command.replace("trl_sft.py", sft)
        command = command.replace("--model DIR …", f"--model {model} --chats {chats} {trainer}")
    elif "--adam_beta1" in command:
        command = command.replace("SCRIPT", f"{trainer_script} {inputs} {trainer}")
    else:
        command = command.replace("SCRIPT", f"{loop} {inputs} --steps 2")
    scripts = quote(str(Path(sys.executable).parent))
    done = start(["bash", "-c", f"PATH={scripts}:$PATH exec {command}"], place, TIME_LIMIT_S)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    facts = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"engine"')))
    assert facts["engine"].startswith({"ZeRO-3": "DeepSpeedEngine", "FSDP2": "FSDP"}[layout])
    assert (facts["zero_stage"], facts["processes"], len(facts["losses"])) == (3 if layout == "ZeRO-3" else None, 2, 2)
    if "trl_sft.py" in command and layout == "ZeRO-3":
        saved = json.loads((place / "out/checkpoint-2/adapter_config.json").read_text())
        found = (saved["r"], saved["lora_alpha"], saved["lora_dropout"], sorted(saved["target_modules"]))
        assert found == (4, 12, 0.0, ["q_proj", "v_proj"])
