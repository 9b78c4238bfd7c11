"""ds_config.trainer.json: what the Hugging Face Trainer fills in is what the plan says."""

from __future__ import annotations

import copy
import json
import math

import pytest

from kit.emit.deepspeed import ds_config
from kit.emit.run_directory import files_of
from kit.emit.trainer import OPTIM, trainer_config, training_arguments
from kit.specs.extra import flat
from tests.deepspeed import cases
from tests.deepspeed.test_config import VARIANTS
from tests.deepspeed.test_optimizers import plan as sgd_plan
from tests.support.workers import pool

NVME = {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"}
EIGHT_BIT = sgd_plan("adamw-8bit", 2)
STOPPED = {"steps_per_print": math.inf}
"""accelerate's way to turn DeepSpeed's progress line off."""
FOR_TRAINER = {
    f"{name} {precision}": cases.plan(**asked, precision=precision)
    for name, asked in {
        "stage 0": {"stage": 0},
        "stage 2": {"stage": 2},
        "stage 3": {"stage": 3, "recompute": "full"},
        "NVMe": NVME,
    }.items()
    for precision in ("fp32", "bf16")
} | {
    name: cases.on("cuda", cases.plan(**VARIANTS[name]))
    for name in ("fp16", "fp16 stage 3 host", "autocast", "fp32 sent in bf16", "ZeRO++")
}
"""The files of GPU plans too; only where the arguments are made is there none, hence ``use_cpu``."""


@pytest.mark.parametrize("chosen", FOR_TRAINER.values(), ids=FOR_TRAINER.keys())
def test_the_trainer_fills_in_the_plans_numbers(chosen, tmp_path):
    config, arguments = trainer_config(chosen), training_arguments(chosen) | {"use_cpu": True}
    assert "auto" in flat(config).values()
    filled, args = pool("deepspeed", cases.WORLD_SIZE).run(fill_in, config, arguments, tmp_path)[0]
    assert filled == ds_config(chosen) | STOPPED
    assert args["gradient_checkpointing"] == (chosen.layout.recompute == "full")


def test_the_trainer_makes_an_optimizer_that_the_file_cannot_name(tmp_path):
    """The Trainer reads the file without one, and knows the name of bitsandbytes' class."""
    from transformers.training_args import OptimizerNames

    arguments = training_arguments(EIGHT_BIT)
    assert "optimizer" not in trainer_config(EIGHT_BIT)
    assert all(OptimizerNames(name) for name in OPTIM.values())
    assert arguments["optim"] == "adamw_bnb_8bit"
    filled, _ = pool("deepspeed", cases.WORLD_SIZE).run(fill_in, trainer_config(EIGHT_BIT), arguments, tmp_path)[0]
    assert filled == ds_config(EIGHT_BIT) | STOPPED
    page = files_of(EIGHT_BIT)["README.md"]
    assert "--optim adamw_bnb_8bit" in page
    assert "bitsandbytes.optim.AdamW8bit" in page
    assert "DummyOptim" not in page


def test_layouts_that_the_trainer_cannot_run_get_no_file_for_it():
    files = {name: files_of(cases.on("cuda", cases.plan(**variant))) for name, variant in VARIANTS.items()}
    without = {name for name in files if "ds_config.trainer.json" not in files[name]}
    assert without == {"AutoTP", "AutoTP stage 3", "Ulysses", "Ulysses stage 2", "over Megatron"}
    assert all("Trainer" not in files[name]["ds_config.md"] for name in without)


def fill_in(config, arguments, directory):
    """What TrainingArguments and the Trainer make of the file, on 2 ranks."""
    from types import SimpleNamespace

    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    (directory / "ds_config.trainer.json").write_text(json.dumps(config))
    try:
        args = TrainingArguments(output_dir=str(directory), deepspeed=copy.deepcopy(config), report_to=[], **arguments)
        assert args.world_size == cases.WORLD_SIZE
        hf_config = args.hf_deepspeed_config
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=cases.plan(0).model.hidden_size))
        hf_config.trainer_config_finalize(args, model, num_training_steps=10)
        return hf_config.config, {"gradient_checkpointing": args.gradient_checkpointing}
    finally:
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the process group of the case
