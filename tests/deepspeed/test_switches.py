"""DeepSpeed's newer switches: its parser takes the files. Plans that they are not for: tests/emit/test_targets.py."""

from __future__ import annotations

import json

import pytest

import kit
from kit.emit.deepspeed import ds_config
from kit.emit.run_directory import files_of
from kit.specs.extra import merged
from tests.deepspeed import cases
from tests.deepspeed.test_config import parse
from tests.support.workers import pool

GH200 = "1xGH200-96"
HOST = {"offload_optimizer": "cpu"}


def planned(gpus, stage, **pins):
    pins = kit.Pins(engine="deepspeed", implementation="huggingface", zero_stage=stage, **pins)
    return kit.plan("llama-3.2-1b", gpus, pins=pins)


COMPILED = {"compile": {"deepcompile": True}}
ON_A_SUPERCHIP = {"zero_optimization": {"offload_optimizer": {"super_offload": True, "cpuadam_cores_perc": 0.9}}}
SWITCHED = {
    "deepcompile, stage 2": ("deepcompile", cases.on("cuda", cases.plan(2, precision="bf16")), COMPILED, (True, False)),
    "deepcompile, stage 3": ("deepcompile", cases.on("cuda", cases.plan(3, precision="bf16")), COMPILED, (True, False)),
    "superoffload": ("superoffload", planned(GH200, 3, **HOST), ON_A_SUPERCHIP, (False, True)),
}


@pytest.mark.parametrize(("target", "chosen", "more", "expected"), SWITCHED.values(), ids=SWITCHED.keys())
def test_deepspeed_parses_the_switch(target, chosen, more, expected):
    config = json.loads(files_of(chosen, [target])[f"ds_config.{target}.json"])
    assert config == merged(ds_config(chosen), more)
    # The parser looks at the batch of two ranks.
    config |= {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    assert pool("deepspeed", cases.WORLD_SIZE).run(switches, config)[0] == (expected, [])


def switches(config):
    from deepspeed.runtime.config import DeepSpeedConfig

    unread, parsed = parse(config)["unread"], DeepSpeedConfig(config)
    host = parsed.zero_config.offload_optimizer
    return (parsed.compile_config.deepcompile, bool(host and host.super_offload)), unread
