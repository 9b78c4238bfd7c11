"""The script that starts scripts which know nothing of kit: ranks that would train apart end with an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.emit import own_script
from tests.emit.plans import TORCH as ON_TORCH
from tests.emit.plans import plan_of
from tests.support.files import files_in

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
    files_in(place, {**STAND_INS, "own_script.py": own_script.text(plan), "work/train.py": script})
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
