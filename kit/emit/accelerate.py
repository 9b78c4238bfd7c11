"""``accelerate.yaml``: what ``accelerate launch --config_file`` reads. Checked against accelerate 1.15.0.

kit avoids three traps, for which accelerate reports no error:

* MULTI_CPU in a YAML, or ``--cpu --num_processes 2``, starts one process. MULTI_GPU starts all of them, on CPUs too.
* ACCELERATE_USE_CPU=true with DeepSpeed trains plain DDP. ``use_cpu`` in the YAML with the DeepSpeed launcher does not.
* ``mixed_precision`` and ``deepspeed_config_file`` state the precision twice. kit writes it to ds_config.json only.

``own_script.py`` avoids a fourth one in users' scripts: without a GPU ``Accelerator()`` sees one process on every rank.
kit's worker is not affected.
"""

from __future__ import annotations

from typing import Any

from kit.emit.derived_file import DerivedFile, chosen
from kit.errors import EngineError
from kit.planner.plan import Plan
from kit.specs import strict_yaml

DS_CONFIG = "ds_config.json"
"""A relative path, which accelerate opens in the working directory; launch.sh changes to its own directory first."""
MAIN_PROCESS_PORT = 29500

PLAN_OWNED_KEYS: dict[str, str] = {
    "distributed_type": "layout.engine",
    "num_processes": "cluster",
    "num_machines": "cluster",
    "use_cpu": "cluster",
    "mixed_precision": "job.precision",
    "deepspeed_config.deepspeed_config_file": "layout.engine",
    "deepspeed_config.zero_stage": "layout.zero_stage",
    "deepspeed_config.gradient_accumulation_steps": "layout.micro_batch_size",
}
"""Dotted key → recipe key that decides it."""


def applies(plan: Plan) -> bool:
    """Whether accelerate starts the plan correctly: kit's worker, or for plain torch a user's script."""
    layout = plan.layout
    data_parallel = layout.engine == "torch" and layout.dp == layout.world_size > 1
    return layout.engine == "deepspeed" or data_parallel


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """The launch of a DeepSpeed plan, or of a torch plan of several processes.

    On several nodes the command line must add ``--machine_rank`` and ``--main_process_ip``; the address in the file is
    the hostfile's placeholder. Raises EngineError if accelerate cannot start the plan.
    """
    layout, cluster = plan.layout, plan.cluster
    on_cpu = cluster.gpu.device == "cpu"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "use_cpu": on_cpu,
        "num_machines": cluster.num_nodes,
        "num_processes": layout.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
    }
    several = cluster.num_nodes > 1  # 0: any free port, so two runs on a machine do not conflict
    config |= (
        {"main_process_ip": "node-0", "main_process_port": MAIN_PROCESS_PORT} if several else {"main_process_port": 0}
    )
    if layout.engine == "deepspeed":
        return config | {"distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed(plan)}
    if layout.engine == "torch" and layout.world_size > 1:
        # accelerate's own fp8 converts other layers than kit's worker (utils/ao.py: all but the first and the last).
        precision = "no" if plan.job.precision == "fp32" else "bf16"
        kind = {"distributed_type": "FSDP", "fsdp_config": _fsdp2(plan)} if layout.zero_stage else {}
        return config | {"distributed_type": "MULTI_GPU", **kind, "mixed_precision": precision}
    raise EngineError(
        f"accelerate does not start {layout.world_size} processes of engine {layout.engine}: one process needs no "
        "launcher, and its Megatron plugin is for older versions of Megatron-LM; use torchrun (launch.sh does)"
    )


def _deepspeed(plan: Plan) -> dict[str, Any]:
    return {
        "deepspeed_config_file": DS_CONFIG,
        # For scripts that build their model after Accelerator(): shard it while it is built. kit's worker needs no key.
        "zero3_init_flag": plan.layout.zero_stage == 3,
        # torchrun on every node instead of pdsh from the first: Slurm and launch.sh start every node anyway.
        **chosen(("deepspeed_multinode_launcher", plan.cluster.num_nodes > 1, "standard")),
    }


def _fsdp2(plan: Plan) -> dict[str, Any]:
    """FSDP2 settings for accelerate scripts; kit's worker does not read them. Read in accelerate/utils/dataclasses.py
    (FullyShardedDataParallelPlugin): transformers names the layers to wrap (``_no_split_modules``)."""
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": plan.layout.zero_stage == 3,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        # One rank reads the weights and sends the other ranks their shards.
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": plan.layout.recompute == "full",
        **chosen(("fsdp_offload_params", plan.layout.offload_param != "none", True)),
    }


FILES = (
    DerivedFile(
        "accelerate.yaml",
        lambda plan: strict_yaml.dump(accelerate_config(plan)),
        applies,
        PLAN_OWNED_KEYS,
    ),
)
