"""Objectives of TRL's trainers: what they hold and compute beside a step, and the files that start them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.api import plan as make_plan
from kit.emit.run_directory import files_of, write
from kit.errors import RunDirectoryError
from kit.planner.plan import Plan
from kit.preflight.run_checks import preflight
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import GrpoSpec, JobSpec, Objective
from kit.specs.layout import Pins
from kit.specs.run import DataSpec, RunSpec
from tests.support.refusals import refusal
from tests.system.examples.cases import with_files

MODEL, CLUSTER = load_model("llama-3.1-8b"), parse_cluster("8xH100")


def planned(objective: Objective, pins: Pins, batch: int = 64, **job: object) -> Plan:
    spec = JobSpec(objective=objective, seq_length=2048, global_batch_size=batch, **job)  # type: ignore[arg-type]
    return make_plan(MODEL, CLUSTER, spec, pins)


ZERO3 = Pins(engine="deepspeed", zero_stage=3, micro_batch_size=2, recompute="none")


def test_the_run_directory_starts_trl_alone() -> None:
    """No file of kit's own loop; TRL's arguments in the README."""
    files = files_of(
        planned(
            "grpo",
            ZERO3,
            grpo=GrpoSpec(num_generations=4, vllm_gpu_memory_utilization=0.4, vllm_enable_sleep_mode=True),
        )
    )
    assert not {"launch.sh", "slurm.sbatch"} & set(files)
    assert {"accelerate.yaml", "ds_config.json", "ds_config.trainer.json"} <= set(files)
    assert [
        words for words in (
            "trl_grpo.py", "--num_generations 4", "--use_vllm true",
            "--vllm_gpu_memory_utilization 0.4 --vllm_enable_sleep_mode true",
        ) if words not in files["README.md"]
    ] == []  # fmt: skip
    assert "launch.sh" in files_of(planned("sft", ZERO3))


@pytest.mark.nightly
@pytest.mark.parametrize("objective", ["dpo", "kto", "reward", "grpo"])
def test_trl_accepts_the_arguments(objective: Objective, tmp_path: Path) -> None:
    """TRL's own parser reads the emitted arguments; a misspelled one is refused."""
    plan = planned(objective, ZERO3, grpo=GrpoSpec(beta=0.1) if objective == "grpo" else None)
    place = with_files(tmp_path / "run", plan)
    command = next(line for line in (place / "README.md").read_text().splitlines() if line.startswith("accelerate"))
    words = command.split(f"trl_{objective}.py")[1].split("--model")[0].split()
    kind = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}[objective]
    code = (
        "import sys; from transformers import HfArgumentParser; import trl; "
        f"HfArgumentParser(trl.{kind}Config).parse_args_into_dataclasses(args=sys.argv[1:])"
    )

    def parse(*more: str) -> int:
        args = [sys.executable, "-c", code, *words, "--output_dir", str(tmp_path), "--use_cpu", "true", *more]
        return subprocess.run(args, capture_output=True, check=False).returncode

    assert parse() == 0
    assert parse("--max_lenght", "3") != 0


def test_kit_train_names_trl(tmp_path: Path) -> None:
    """One problem, and what to do: not the data that kit's own loop would need."""
    written = write(
        planned("dpo", ZERO3, epochs=1.0), RunSpec(data=DataSpec(train=str(tmp_path / "none"))), tmp_path / "run"
    )
    said = refusal(RunDirectoryError, preflight, written)
    assert (bool(re.search(r"trained by TRL's DPOTrainer, .*README\.md", said)), "convert data" in said) == (
        True,
        False,
    )
