"""What lint says of the lines of a script is what a shell makes of them: bash runs each with a launcher that prints."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from kit.addons.lint import lint
from kit.addons.lint.commands import commands
from tests.support.files import file_with, files_in

SCRIPTS = (
    "torchrun --nproc_per_node 8 \\\n  t.py --seed 1",
    "torchrun --nproc_per_node 8 \\ \n  t.py --seed 1",
    "GPUS=4\ntorchrun --nproc_per_node=$GPUS t.py --seed ${GPUS}",
    'GPUS=4\nALL="--nnodes 1 --nproc_per_node $GPUS"\ntorchrun $ALL t.py',
    'ALL=(\n  --nnodes 1\n  # two of them\n  --nproc_per_node 2\n)\ntorchrun "${ALL[@]}" t.py --name "a b"',
    'ALL=(--nnodes 1)\nALL+=(--nproc_per_node 2)\ntorchrun "${ALL[@]}" t.py',
    'ALL=(--nnodes 1)\nALL=(--nproc_per_node 2)\ntorchrun "${ALL[@]}" t.py',
    'ALL="--nnodes 1"\nALL+=" --nproc_per_node 2"\ntorchrun $ALL t.py',
    "if true; then\n  A=1\nfi\nN=2\nN=4\ntorchrun --nproc_per_node $N t.py",
    "export A=1 \nB='$A'\ntorchrun --nnodes $A t.py",
    "torchrun --nproc_per_node 8 t.py # --seed 2",
    "N=3\ntorchrun --nproc_per_node 8 t.py --seed $N>/dev/stdout 2>/dev/null",
    'torchrun --nproc_per_node 8 t.py --seed "4">&1 <<<no 2>&1',
    "N=4\ntorchrun --nproc_per_node $((N * (3 - 1))) t.py --seed $(expr $N \\* 2) --bf16",
)


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_the_words_are_those_that_the_shell_hands_over(script: str, tmp_path: Path) -> None:
    """bash -n accepts all of them."""
    path = file_with(tmp_path / "run.sh", 'torchrun() { printf "%q " "$@"; }\n' + script + "\n")
    subprocess.run(["bash", "-n", str(path)], check=True)
    said = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=False).stdout
    (command,) = commands(script, "run.sh")
    read = [word for option, value in command.options for word in (option, value) if word is not None]
    handed = [part for word in shlex.split(said) for part in ([word] if word.strip() else [])]
    if "=" in handed[0]:
        handed[0:1] = handed[0].split("=", 1)
    assert [word for word in (*read, command.program, *command.words) if word.strip()] == handed


def test_a_script_that_is_handed_over_is_read() -> None:
    """With what is set above it; an apostrophe in it ends with it."""
    script = "N=8\nsbatch <<EOF\necho don't\nEOF\nsbatch <<EOF\ntorchrun --nproc_per_node $N a.py\nEOF\ntorchrun b.py\n"
    found = [(each.program, each.line, each.value("nproc_per_node")) for each in commands(script, "run.sh")]
    assert found == [("b.py", 8, None), ("a.py", 6, "8")]


def test_a_variable_under_a_condition_is_put_in_where_it_has_one_value() -> None:
    script = (
        'N=8\nif [ -n "$X" ]; then\n  N=4\nfi\nif true; then\n  M=2\nfi\ntorchrun --nproc_per_node $N --nnodes $M t.py'
    )
    (command,) = commands(script, "run.sh")
    assert (command.value("nproc_per_node"), command.value("nnodes")) == ("$N", "2")


@pytest.mark.parametrize(
    ("first", "found"),
    [
        ("bash b.sh\n./c.sh\nsh a.sh\nsh c.sh", [("b.sh", None, "not-read"), ("c.sh", 2, "one-process")]),
        ("bash b.sh\ntorchrun a.py", [("a.sh", 2, "one-process")]),
        ("bash d.sh", [("a.sh", None, "not-read")]),
    ],
)
def test_scripts_that_a_script_starts_are_read_where_it_starts_nothing_else(
    first: str, found: list[tuple[str, int | None, str]], tmp_path: Path
) -> None:
    """Each once, and not those that they start in turn, which may be the first again."""
    files_in(tmp_path, {"a.sh": first, "b.sh": "sh a.sh\nsh c.sh", "c.sh": "sh b.sh\ntorchrun c.py"})
    assert [(each.file, each.line, each.rule) for each in lint(tmp_path / "a.sh")] == found
