"""Keys of ds_config.json that follow from precision, accumulation and disks, and the page that explains them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

import pytest

import kit
from kit.emit.deepspeed import ds_config
from kit.emit.deepspeed_rationale import ds_config_page
from kit.emit.environment import assignments
from kit.emit.run_directory import RunDirectory, files_of, write
from kit.planner.plan import Plan
from kit.specs.run import DataSpec, RunSpec


def plan(precision: Literal["bf16", "fp16", "fp32"] = "bf16", batch: int = 128, **pins: object) -> Plan:
    job = kit.JobSpec(global_batch_size=batch, precision=precision)
    chosen = {"implementation": "huggingface", "zero_stage": 2, "micro_batch_size": 1, **pins}
    return kit.plan("llama-3.2-1b", "8xA100-80", job, kit.Pins(engine="deepspeed", **chosen))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_one_precision_is_on_and_no_other_is_named(precision: Literal["bf16", "fp16", "fp32"]) -> None:
    config = ds_config(plan(precision))
    on = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")]
    assert on == ([] if precision == "fp32" else [precision])


@pytest.mark.parametrize(("batch", "dtype"), [(128, "fp32"), (8, None)])
def test_micro_batches_are_summed_in_fp32(batch: int, dtype: str | None) -> None:
    """DeepSpeed would sum 16 of them in bf16; one has nothing to be summed with."""
    assert ds_config(plan(batch=batch)).get("data_types", {}).get("grad_accum_dtype") == dtype


def test_disks_have_a_section_of_their_own() -> None:
    on_disk = plan(zero_stage=3, offload_optimizer="nvme")
    assert ds_config(on_disk)["aio"]["queue_depth"] >= 8
    assert "aio" not in ds_config(plan())


def test_the_page_names_the_trainers_arguments_where_the_trainer_can_run_the_plan() -> None:
    assert "--per_device_train_batch_size 1" in ds_config_page(plan())
    tensor_parallel = plan(implementation="local", tp=2)
    assert "--per_device_train_batch_size" not in ds_config_page(tensor_parallel)


def test_megatrons_collectives_keep_their_order_and_its_script_is_there() -> None:
    """megatron-core overlaps tensor parallelism by one connection to the device (CUDA_DEVICE_MAX_CONNECTIONS=1)."""
    pins = kit.Pins(engine="megatron", tp=2, implementation="transformer_engine")
    split = kit.plan("llama-3.1-8b", "8xA100-80", kit.JobSpec(global_batch_size=128), pins)
    assert any("CUDA_DEVICE_MAX_CONNECTIONS" in line for line in assignments(split))
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in line for line in assignments(plan()))
    assert "pretrain_gpt.sh" in files_of(split)
    assert "pretrain_gpt.sh" not in files_of(plan())


def test_reasons_in_scripts_are_whole_sentences() -> None:
    """Fabric and engine say why in lower case; the comment begins with a capital of the same word."""
    two = kit.plan("llama-3.1-8b", "p5.48xlarge:2", pins=kit.Pins(engine="torch"))
    reasons = [line[2:] for line in assignments(two) if line.startswith("# ")]
    assert reasons
    assert all(text[0].isupper() or not text[0].isalpha() for text in reasons)
    assert all(text.endswith(".") for text in reasons)


def test_edited_buffers_that_need_more_of_the_host_say_so(tmp_path: Path) -> None:
    run = RunSpec(data=DataSpec(train=str(tmp_path / "rows")), nvme_path=str(tmp_path))
    directory = write(plan(zero_stage=3, offload_optimizer="nvme"), run, tmp_path / "run").path
    config = json.loads((directory / "ds_config.json").read_text())
    config["zero_optimization"]["sub_group_size"] *= 4
    (directory / "ds_config.json").write_text(json.dumps(config))
    planned = RunDirectory.open(directory).plan.predicted.host_ram_gib_per_node
    said = re.search(
        r", ([\d.]+) GiB of host memory per node \(([\d.]+) planned\)",
        RunDirectory.open(directory).memory_after_edits(),
    )
    assert said
    assert float(said[1]) > float(said[2]) == pytest.approx(planned, abs=0.06)
