"""DeepSpeed's newer switches: its parser takes the files, others are refused by name; why there is none for ZenFlow."""

from __future__ import annotations

import json

import pytest
import torch

import kit
from kit.emit.deepspeed import ds_config
from kit.emit.run_directory import files_of, write
from kit.errors import SpecError
from kit.specs.run import DataSpec, RunSpec
from tests.deepspeed import cases
from tests.deepspeed.test_config import on, parse
from tests.support.workers import pool

GH200 = "1xGH200-96"
HOST = {"offload_optimizer": "cpu"}


def planned(gpus, stage, **pins):
    pins = kit.Pins(engine="deepspeed", implementation="huggingface", zero_stage=stage, **pins)
    return kit.plan("llama-3.2-1b", gpus, pins=pins)


def emitted(plan, target):
    return json.loads(files_of(plan, [target])[f"ds_config.{target}.json"])


def test_deepspeed_parses_deepcompile():
    for stage in (2, 3):
        chosen = on("cuda", cases.plan(stage, precision="bf16"))
        config = emitted(chosen, "deepcompile")
        assert config == ds_config(chosen) | {"compile": {"deepcompile": True}}
        switched, unread = pool("deepspeed", cases.WORLD_SIZE).run(switches, config)[0]
        assert unread == []
        assert switched == (True, False)


def test_deepspeed_parses_superoffload():
    config = emitted(planned(GH200, 3, **HOST), "superoffload")
    # The parser looks at the batch of two ranks.
    config |= {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    switched, unread = pool("deepspeed", cases.WORLD_SIZE).run(switches, config)[0]
    assert unread == []
    assert switched == (False, True)


def switches(config):
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute otherwise
    unread = parse(config)["unread"]
    parsed = DeepSpeedConfig(config)
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


def test_zenflow_still_permutes_the_weights():
    """If this fails, DeepSpeed has mended it: offer ZenFlow (docs/deepspeed.md)."""
    settings = ds_config(cases.plan(2, precision="bf16", offload_optimizer="cpu"))
    settings.pop("data_types")
    plain, flowing = pool("deepspeed", cases.WORLD_SIZE).run(initialized, settings)[0]
    assert plain == (True, True)
    assert flowing == (False, True)


def initialized(settings):
    """Without and with ZenFlow: whether ``deepspeed.initialize`` leaves a matrix, and a vector, as they were. ZenFlow's
    matrix has the values of the transposed one, in their order."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute otherwise
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    del settings["optimizer"]["params"]["torch_adam"]  # ZenFlow's own Adam gets these arguments; torch's steps here
    settings |= {"zero_force_ds_cpu_optimizer": False}
    found = []
    for section in ({}, {"zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 2}}):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4)
        before = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
        config = settings | {"zero_optimization": settings["zero_optimization"] | section}
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
        now = dict(engine.module.named_parameters())
        found.append(tuple(torch.equal(now[name], before[name]) for name in ("weight", "bias")))
        if section:
            assert torch.equal(now["weight"].flatten(), before["weight"].t().flatten())
        engine.destroy()
        groups._release_process_group_references(group=None)
    return found
