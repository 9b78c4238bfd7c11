"""The reference model that TRL really holds, against the planner's bytes, on two CPU processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.cost.memory.rank_huggingface import reference_bytes
from kit.emit import own_script
from kit.emit.trainer import script_arguments
from tests.system.examples.cases import LAUNCH, LAYOUTS, start, with_files
from tests.system.examples.inputs import plan_for, prepare

SCRIPT = """
import sys
from datasets import load_dataset
from transformers import HfArgumentParser
from trl import DPOConfig, DPOTrainer

model, rows, *rest = sys.argv[1:]
(training,) = HfArgumentParser(DPOConfig).parse_args_into_dataclasses(args=rest)
rows = load_dataset("json", data_files=rows, split="train")
trainer = DPOTrainer(model=model, args=training, train_dataset=rows)
trainer.train()

def held(parameter):
    shard = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter
    shard = shard.to_local() if hasattr(shard, "to_local") else shard
    return shard.numel() * shard.element_size()

if trainer.is_world_process_zero():
    print("HELD", sum(map(held, trainer.ref_model.parameters())))
trainer.accelerator.end_training()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "precision"), [("ZeRO-2", "bf16"), ("ZeRO-3", "fp32"), ("FSDP2", "bf16")])
def test_the_reference_takes_the_planned_bytes(layout: str, precision: str, tmp_path: Path) -> None:
    """TrainingArguments takes bf16 on a CPU with use_cpu alone, which makes ZeRO-3's partition one of one process."""
    directory = prepare()
    plan = plan_for(
        directory / "model",
        LAYOUTS[layout],
        micro_batch=1,
        objective="dpo",
        precision=precision,
        seq_length=128,
    )
    place = with_files(tmp_path / "run", plan)
    (place / "script.py").write_text(SCRIPT)
    planned = script_arguments(plan) | {"use_cpu": layout == "ZeRO-2", "bf16": layout == "ZeRO-2"}
    words = [word for key, value in planned.items() for word in (f"--{key}", str(value).lower())]
    common = [
        "--output_dir", "out", "--max_steps", "1", "--report_to", "none", "--save_strategy", "no",
        "--lr_scheduler_type", "constant", "--disable_tqdm", "true",
    ]  # fmt: skip
    data = [str(directory / "model"), str(directory / "preferences.jsonl")]
    command = [*LAUNCH, "--config_file", "accelerate.yaml", own_script.NAME, "script.py", *data, *words, *common]
    done = start(command, place, limit_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("HELD")[1].split()[0]) == pytest.approx(reference_bytes(plan.workload), rel=0.002)
