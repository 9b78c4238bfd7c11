"""accelerate.yaml: taken by accelerate's loader, and a real launch of 2 CPU processes under it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.emit.accelerate import GUARDED, accelerate_config
from kit.emit.deepspeed import ds_config
from kit.errors import EngineError
from kit.specs import yaml
from tests.deepspeed import cases
from tests.training import tiny

ROOT = Path(__file__).parents[2]


def several_machines(chosen):
    cluster = dataclasses.replace(chosen.cluster, num_nodes=2, gpus_per_node=1, inter_node_gbytes_per_s=1.0)
    return dataclasses.replace(chosen, cluster=cluster)


def on_gpus(chosen):
    gpu = dataclasses.replace(chosen.cluster.gpu, device="cuda")
    return dataclasses.replace(chosen, cluster=dataclasses.replace(chosen.cluster, gpu=gpu))


PLANS = {
    "DeepSpeed on CPU": cases.plan(3),
    "DeepSpeed on GPUs": on_gpus(cases.plan(2, precision="bf16")),
    "DeepSpeed on two machines": several_machines(on_gpus(cases.plan(3))),
    "DDP on GPUs": on_gpus(tiny.plan(dp=2)),
}


@pytest.mark.parametrize("chosen", PLANS.values(), ids=PLANS.keys())
def test_accelerate_loads_it(chosen, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.dump(accelerate_config(chosen)))
    loaded = load_config_from_file(str(file))  # raises on an unknown key
    deepspeed = chosen.layout.engine == "deepspeed"
    assert loaded.distributed_type.value == ("DEEPSPEED" if deepspeed else "MULTI_GPU")
    assert loaded.num_processes == 2
    assert loaded.num_machines == chosen.cluster.num_nodes
    assert loaded.use_cpu is (chosen.cluster.gpu.device == "cpu")
    assert (loaded.main_process_ip is None) is (chosen.cluster.num_nodes == 1)
    assert (loaded.main_process_port == 0) is (chosen.cluster.num_nodes == 1)
    # One place for the precision: beside a ds_config there must be none here.
    assert (loaded.mixed_precision is None) is deepspeed
    assert loaded.deepspeed_config.get("deepspeed_config_file") == ("ds_config.json" if deepspeed else None)


@pytest.mark.parametrize("chosen", [tiny.plan(dp=2), tiny.plan(), on_gpus(tiny.plan(engine="megatron", tp=2))])
def test_what_accelerate_would_start_wrongly_is_refused(chosen):
    with pytest.raises(EngineError, match="torchrun"):
        accelerate_config(chosen)


def test_guarded_keys_are_emitted_or_would_override_the_plan():
    config = accelerate_config(cases.plan(3)) | accelerate_config(on_gpus(tiny.plan(dp=2)))
    top = {key for key in GUARDED if "." not in key}
    assert top <= config.keys()


SCRIPT = """
import json, os, torch
import deepspeed
# Compiled by deepspeed for inference alone, half a minute: see kit/engines/deepspeed/build.py.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
from accelerate import Accelerator, PartialState
PartialState(cpu=True)
accelerator = Accelerator()
model = torch.nn.Linear(4, 4, bias=False)
data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
with open("ds_config.json") as file:
    adam = json.load(file)["optimizer"]["params"]
from accelerate.utils import DummyOptim
model, optimizer, data = accelerator.prepare(model, DummyOptim(model.parameters(), lr=adam["lr"]), data)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
facts = [type(model).__module__ + "." + type(model).__name__, int(model.zero_optimization_stage()),
         accelerator.num_processes, int(model.dp_world_size), str(accelerator.device)]
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump(facts, file)
accelerator.end_training()
# A thread of gloo that frees a tensor while Python finalises aborts the process (docs/findings.md, torch).
from kit.training.__main__ import leave
leave(0)
"""


def test_a_launch_on_two_cpu_processes_is_deepspeeds(tmp_path):
    """Not DDP, not one process, not two strangers: accelerate starts each of these with exit code 0 elsewhere."""
    chosen = cases.plan(3)
    (tmp_path / "accelerate.yaml").write_text(yaml.dump(accelerate_config(chosen)))
    (tmp_path / "ds_config.json").write_text(json.dumps(ds_config(chosen)))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "script.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("DS_ACCELERATOR", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ["deepspeed.runtime.engine.DeepSpeedEngine", 3, 2, 2, ranks[0][4]]
    assert ranks[1][:4] == ranks[0][:4]
    assert all(rank[4].startswith("cpu") for rank in ranks)
