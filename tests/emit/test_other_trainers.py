"""Files for other training programs hold the plan's batch, sharding, precision and recomputation. Their own parsers
read them in ``tests.system.other_trainers``."""

from __future__ import annotations

import itertools
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

import kit
from kit.emit.generated import shipped_plan
from kit.emit.other_trainers import FILES, torchtitan_arguments
from kit.emit.run_directory import TARGETS, files_of
from kit.planner.plan import Plan
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Pins

SFT = JobSpec(objective="sft", global_batch_size=64)
FSDP2 = Pins(engine="torch", zero_stage=3, tp=1)


def of(plan: Plan) -> dict[str, Any]:
    """File → its content, for each file that applies."""
    return {file.name: yaml.safe_load(file.text(plan)) for file in FILES if file.applies(plan) and ".yaml" in file.name}


def test_every_program_gets_the_batch_of_the_plan() -> None:
    plan = kit.plan("llama-3.1-8b", "8xH100", SFT, FSDP2)
    files, layout = of(plan), plan.layout
    assert set(files) == {"accelerate.parallelism.yaml", "axolotl.yaml", "llamafactory.yaml", "ms_swift.yaml"}
    for name, micro in (
        ("axolotl.yaml", "micro_batch_size"),
        ("llamafactory.yaml", "per_device_train_batch_size"),
        ("ms_swift.yaml", "per_device_train_batch_size"),
    ):
        file = files[name]
        assert file[micro] * file["gradient_accumulation_steps"] * layout.dp == 64
        assert file["bf16"] is True
        assert file["learning_rate"] == plan.job.learning_rate
    assert files["axolotl.yaml"]["fsdp_version"] == 2
    assert files["axolotl.yaml"]["gradient_checkpointing"] is (layout.recompute == "full")
    assert files["llamafactory.yaml"].get("disable_gradient_checkpointing", False) is (layout.recompute != "full")


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_plans_name_the_trainers_file(stage: int) -> None:
    plan = kit.plan("llama-3.1-8b", "8xH100", SFT, Pins(engine="deepspeed", zero_stage=stage))
    assert "ds_config.trainer.json" in files_of(plan)
    for name, file in of(plan).items():
        assert file["deepspeed"] == "ds_config.trainer.json", name
        assert "fsdp_version" not in file


def test_adapters_are_those_of_the_job() -> None:
    job = JobSpec(objective="sft", global_batch_size=64, lora=LoraSpec(rank=8, alpha=16))
    files = of(kit.plan("llama-3.1-8b", "8xH100", job, FSDP2))
    assert files["axolotl.yaml"]["adapter"] == "lora"
    assert files["llamafactory.yaml"]["finetuning_type"] == files["ms_swift.yaml"]["tuner_type"] == "lora"
    assert {files[name]["lora_rank"] for name in ("llamafactory.yaml", "ms_swift.yaml")} == {8}
    assert files["axolotl.yaml"]["lora_r"] == 8
    assert files["axolotl.yaml"]["lora_target_linear"]
    listed = LoraSpec(target_modules=("q_proj", "v_proj"))
    files = of(kit.plan("llama-3.1-8b", "8xH100", replace(job, lora=listed), FSDP2))
    assert (
        files["axolotl.yaml"]["lora_target_modules"] == files["ms_swift.yaml"]["target_modules"] == ["q_proj", "v_proj"]
    )
    assert files["llamafactory.yaml"]["lora_target"] == "q_proj,v_proj"


def test_accelerates_launcher_reads_the_sizes_of_tensor_parallelism(tmp_path: Path) -> None:
    plan = kit.plan("llama-2-13b", "16xH100", pins=Pins(engine="torch", tp=2, zero_stage=3))
    path = tmp_path / "accelerate.yaml"
    path.write_text(files_of(plan, ["accelerate-parallelism"])["accelerate.parallelism.yaml"])
    words = ["--config_file", str(path), "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert args.use_parallelism_config
    assert int(args.parallelism_config_tp_size) == 2
    assert int(args.parallelism_config_dp_shard_size) == plan.layout.dp == 8


def test_torchtitan_gets_the_plan_as_arguments(tmp_path: Path) -> None:
    plan = kit.plan("llama-3.1-8b", "16xH100", pins=Pins(engine="torch", tp=2, zero_stage=3))
    words = torchtitan_arguments(plan)
    given = dict(itertools.pairwise(words))
    assert given["--training.num-tokens-per-train-step"] == str(plan.job.global_batch_size * plan.job.seq_length)
    tokens = plan.layout.micro_batch_size * plan.job.seq_length
    assert given["--training.num-tokens-per-microbatch-per-dp-rank"] == str(tokens)
    assert given["--training.max-context-length"] == str(plan.job.seq_length)
    assert given["--parallelism.tensor-parallel-degree"] == "2"
    assert given["--parallelism.data-parallel-shard-degree"] == str(plan.layout.dp)
    script = tmp_path / "torchtitan.sh"
    script.write_text(files_of(plan, ["torchtitan"])["torchtitan.sh"])
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    ran = subprocess.run(
        ["bash", str(script), "--dump-folder", "a b"], capture_output=True, text=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert ran.stdout.splitlines()[-len(words) :] == words
    assert "a b" in ran.stdout.splitlines()


def test_a_plan_that_they_cannot_run_has_no_such_file() -> None:
    megatron = kit.plan("llama-3-70b", "64xH100", pins=Pins(engine="megatron"))
    seq2seq = kit.plan("t5-base", "8xH100", JobSpec(objective="seq2seq", seq_length=512))
    for plan in (megatron, seq2seq, shipped_plan("tiny-llama-pretrain-zero3-2xcpu")):
        assert plan is not None
        assert [file.name for file in FILES if file.applies(plan)] == []
    assert {file.target for file in FILES} < set(TARGETS)


def test_every_program_gets_the_epochs_of_the_job() -> None:
    files = of(kit.plan("llama-3.1-8b", "8xH100", replace(SFT, epochs=2.5), FSDP2))
    assert files["axolotl.yaml"]["num_epochs"] == 2.5
    assert files["llamafactory.yaml"]["num_train_epochs"] == files["ms_swift.yaml"]["num_train_epochs"] == 2.5
    assert "num_train_epochs" not in of(kit.plan("llama-3.1-8b", "8xH100", SFT, FSDP2))["llamafactory.yaml"]


def test_the_trainers_commands_have_the_epochs_of_the_job() -> None:
    """Read by TRL's own parser, where a command says no length TRL makes three epochs."""
    dpo = replace(SFT, objective="dpo", epochs=0.5)
    page = files_of(kit.plan("llama-3.1-8b", "8xH100", dpo, Pins(engine="deepspeed", zero_stage=3)))["README.md"]
    assert "--num_train_epochs 0.5 " in page
    assert "has no `job.epochs`" not in page
    counted = files_of(kit.plan("llama-3.1-8b", "8xH100", replace(dpo, epochs=None), Pins(engine="deepspeed")))
    assert "--num_train_epochs 0.5" not in counted["README.md"]
    assert "has no `job.epochs`: TRL makes three unless you add `--num_train_epochs`" in counted["README.md"]
