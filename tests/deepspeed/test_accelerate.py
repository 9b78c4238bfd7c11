"""accelerate.yaml: taken by accelerate's loader. A real launch of 2 CPU processes under it: tests/test_examples.py."""

from __future__ import annotations

import dataclasses

import pytest

from kit.emit.accelerate import PLAN_OWNED_KEYS, accelerate_config
from kit.errors import EngineError
from kit.specs import strict_yaml
from tests.deepspeed import cases
from tests.support import tiny


def on(device, chosen, **cluster):
    gpu = dataclasses.replace(chosen.cluster.gpu, device=device)
    return dataclasses.replace(chosen, cluster=dataclasses.replace(chosen.cluster, gpu=gpu, **cluster))


TWO = {"num_nodes": 2, "gpus_per_node": 1, "inter_node_gbytes_per_s": 1.0}
PLANS = {
    "DeepSpeed on CPU": cases.plan(3),
    "DeepSpeed on GPUs": on("cuda", cases.plan(2, precision="bf16")),
    "DeepSpeed on two machines": on("cuda", cases.plan(3), **TWO),
    "DDP on GPUs": on("cuda", tiny.plan(dp=2)),
}


@pytest.mark.parametrize("chosen", PLANS.values(), ids=PLANS.keys())
def test_accelerate_loads_it(chosen, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    file.write_text(strict_yaml.dump(accelerate_config(chosen)))
    loaded = load_config_from_file(str(file))  # raises on an unknown key
    deepspeed, alone = chosen.layout.engine == "deepspeed", chosen.cluster.num_nodes == 1
    assert loaded.distributed_type.value == ("DEEPSPEED" if deepspeed else "MULTI_GPU")
    assert (loaded.num_processes, loaded.num_machines) == (2, chosen.cluster.num_nodes)
    assert loaded.use_cpu is (chosen.cluster.gpu.device == "cpu")
    assert [loaded.main_process_ip is None, loaded.main_process_port == 0] == [alone, alone]
    # One place for the precision: beside a ds_config there must be none here.
    assert (loaded.mixed_precision is None) is deepspeed
    assert loaded.deepspeed_config.get("deepspeed_config_file") == ("ds_config.json" if deepspeed else None)


@pytest.mark.parametrize("chosen", [tiny.plan(), on("cuda", tiny.plan(engine="megatron", tp=2))])
def test_what_accelerate_would_start_wrongly_is_refused(chosen):
    with pytest.raises(EngineError, match="torchrun"):
        accelerate_config(chosen)


def test_guarded_keys_are_emitted_or_would_override_the_plan():
    config = accelerate_config(cases.plan(3)) | accelerate_config(on("cuda", tiny.plan(dp=2)))
    top = {key for key in PLAN_OWNED_KEYS if "." not in key}
    assert top <= config.keys()
