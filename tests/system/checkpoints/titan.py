"""torchtitan's own Trainer trains a tiny Llama on CPU processes; kit goes on from its checkpoint.

    python3 -m venv TITAN && TITAN/bin/pip install torch==2.13.0 torchtitan==0.3.0 triton
    python -m tests.system.checkpoints.titan TITAN/bin/python --write

Compared are losses and gradient norms of steps 4 to 6 with torchtitan's own. The fault keeps torchtitan's order of the
rows of queries and keys, and must be noticed. ``--write`` keeps the table in docs/checkpoints.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from kit.engines.base import IGNORE_INDEX
from kit.engines.huggingface.models import hf_config
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.foreign import torchtitan
from tests.deepspeed import foreign as runs
from tests.deepspeed import test_foreign as foreign
from tests.support import tiny
from tests.support.page import Section, table
from tests.support.program import run
from tests.system.checkpoints.__main__ import PAGE, TARGETS
from tests.training import batches

WRITER = "deepspeed-of-torchtitan"
"""For ``foreign.decay``: no decay at all, which torchtitan would do to norms too."""
LAYOUTS = {"2 processes, fused queries, keys and values": (2, True), "1 process, three projections": (1, False)}


def main(
    python: Annotated[Path, typer.Argument(help="The interpreter of an environment that has torchtitan.")],
    write: Annotated[bool, typer.Option(help="Keep the table in the page.")] = False,
) -> int:
    """Exit code 1 where a curve differs by more than the tests allow, or the fault by less."""
    rows, errors, faults = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        for number, (title, (processes, fused)) in enumerate(LAYOUTS.items()):
            root = Path(directory) / str(number)
            path, expected = trained(python, root, processes, fused)
            convert(path, "exchange", root / "exchange")
            found = [
                foreign.error(foreign.continued(target, WRITER, root / "exchange", root / f"run-{at}"), expected)
                for at, target in enumerate(TARGETS)
            ]
            with patch.object(torchtitan, "as_halves", lambda rows, _: rows):
                convert(path, "exchange", root / "fault")
            fault = foreign.error(foreign.continued(TARGETS[0], WRITER, root / "fault", root / "run-fault"), expected)
            rows.append([title, *(f"{error:.0e}" for error in (*found, fault))])
            errors += found
            faults.append(fault)
    heads = ["torchtitan on", *(target.replace("zero-", "ZeRO-") for target in TARGETS), "torch on 1, rows not moved"]
    text = table(heads, rows, right=True)
    print(text)
    if write:
        Section(PAGE, "torchtitan", lambda: text).write()
    return int(max(errors) > foreign.CLOSEST or min(faults) < 1e-3)


def trained(python: Path, root: Path, processes: int, fused: bool) -> tuple[Path, foreign.Curve]:
    """torchtitan's checkpoint of step 3, with a config.json beside it, and the curve of its steps 4 to 6."""
    root.mkdir()
    plan = foreign.plan("torch on 1", foreign.decay(WRITER))
    optimizer = plan.job.optimizer
    config: Any = hf_config(tiny.model())
    settings = {
        "model": config.to_dict(),
        "fused": fused,
        "saved_at": runs.SAVED_AT,
        "grad_clip": plan.job.grad_clip,
        "adam": {
            "lr": plan.job.learning_rate,
            "betas": (optimizer.beta1, optimizer.beta2),
            "eps": optimizer.eps,
            "weight_decay": 0.0,
        },
        "rows": [_rows(step) for step in range(runs.STEPS)],
    }
    (root / "settings.json").write_text(json.dumps(settings, default=str))
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    script = Path(__file__).with_name("titan_run.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command += [str(script), str(root / "settings.json"), str(root / "out")]
    subprocess.run(command, check=True, env=environment, timeout=300)
    path = root / "out" / "checkpoint" / f"step-{runs.SAVED_AT}"
    config.save_pretrained(path)
    curve = json.loads((root / "out" / "curve.json").read_text())
    return path, [(loss, norm) for loss, norm, _ in curve[runs.SAVED_AT :]]


def _rows(step: int) -> dict[str, list[list[int]]]:
    """The samples that ``tests.deepspeed.foreign.as_kit`` takes: the last label of each does not count."""
    samples = [batches.sample(step * 4 + row) for row in range(4)]
    return {
        "inputs": [tokens.tolist() for tokens, _ in samples],
        "labels": [[*labels.tolist()[:-1], IGNORE_INDEX] for _, labels in samples],
    }


if __name__ == "__main__":
    run(main)
