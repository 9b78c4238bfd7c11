"""DeepSpeed's newer switches: its parser takes the files, others are refused by name."""

from __future__ import annotations

import json

import pytest

import kit
from kit.emit.deepspeed import ds_config
from kit.emit.run_directory import files_of, write
from kit.errors import SpecError
from kit.specs.run import DataSpec, RunSpec
from tests.deepspeed import cases
from tests.deepspeed.test_accelerate import on
from tests.deepspeed.test_config import parse
from tests.support.workers import pool

GH200 = "1xGH200-96"
HOST = {"offload_optimizer": "cpu"}


def planned(gpus, stage, **pins):
    pins = kit.Pins(engine="deepspeed", implementation="huggingface", zero_stage=stage, **pins)
    return kit.plan("llama-3.2-1b", gpus, pins=pins)


SWITCHED = {
    "deepcompile, stage 2": ("deepcompile", on("cuda", cases.plan(2, precision="bf16")), (True, False)),
    "deepcompile, stage 3": ("deepcompile", on("cuda", cases.plan(3, precision="bf16")), (True, False)),
    "superoffload": ("superoffload", planned(GH200, 3, **HOST), (False, True)),
}


@pytest.mark.parametrize(("target", "chosen", "expected"), SWITCHED.values(), ids=SWITCHED.keys())
def test_deepspeed_parses_the_switch(target, chosen, expected):
    config = json.loads(files_of(chosen, [target])[f"ds_config.{target}.json"])
    if target == "deepcompile":
        assert config == ds_config(chosen) | {"compile": {"deepcompile": True}}
    # The parser looks at the batch of two ranks.
    config |= {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    assert pool("deepspeed", cases.WORLD_SIZE).run(switches, config)[0] == (expected, [])


def switches(config):
    from deepspeed.runtime.config import DeepSpeedConfig

    unread, parsed = parse(config)["unread"], DeepSpeedConfig(config)
    host = parsed.zero_config.offload_optimizer
    return (parsed.compile_config.deepcompile, bool(host and host.super_offload)), unread


@pytest.mark.parametrize(
    ("target", "gpus", "stage", "pins", "says"),
    [
        ("deepcompile", "8xH100", 0, {}, "zero_stage=2 or 3"),
        ("deepcompile", "8xH100", 1, {"micro_batch_size": 1}, "or 1 with one micro batch"),
        ("deepcompile", "8xH100", 3, {"offload_param": "cpu"}, "offload_param=none"),
        ("superoffload", "8xH100", 3, HOST, "H100 is none"),
        ("superoffload", GH200, 2, HOST, "it needs zero_stage=3, offload_optimizer=cpu"),
        ("superoffload", GH200, 3, {}, "it needs zero_stage=3, offload_optimizer=cpu"),
        ("torchtitan", "8xH100", 3, {}, "no file for this plan"),
    ],
)
def test_a_plan_that_a_switch_is_not_for_is_refused_and_nothing_is_written(target, gpus, stage, pins, says, tmp_path):
    with pytest.raises(SpecError, match=f"--target {target} for deepspeed.*{says}"):
        write(planned(gpus, stage, **pins), RunSpec(data=DataSpec(train="train")), tmp_path / "run", [target])
    assert list(tmp_path.iterdir()) == []


def test_cpu_processes_cannot_run_deepcompile():
    assert "ds_config.deepcompile.json" not in files_of(cases.plan(2), ["deepcompile"])


def test_no_search_chooses_a_switch():
    assert not [name for name in files_of(planned(GH200, 3, **HOST)) if "superoffload" in name or "deepcompile" in name]
