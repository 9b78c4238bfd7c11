"""Builds a DeepSpeed engine from a run directory, and checks that DeepSpeed built what the plan says."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from kit.emit.run_directory import RunDirectory
from kit.engines.deepspeed import nvme, ops
from kit.engines.deepspeed.data_parallel import DataParallel
from kit.engines.deepspeed.eight_bit import EightBitAndVectors
from kit.engines.deepspeed.nvme_state import NvmeState
from kit.engines.deepspeed.state import FullyPartitionedState, ParameterState, PartitionedState, UnshardedState
from kit.engines.deepspeed.strategy import ModelParallelStrategy
from kit.errors import EngineError
from kit.specs.job import JobSpec


def build_deepspeed(rundir: RunDirectory) -> tuple[deepspeed.DeepSpeedEngine, ModelParallelStrategy]:
    """Collective. Build model, optimizer and DeepSpeed engine. Raises EngineError if they differ from the plan."""
    settings = copy.deepcopy(dict(rundir.settings))
    _check_settings(settings)
    _complete_environment()
    # DeepSpeed 0.19.8 calls collectives by deprecated names, so torch 2.13 warns in every step. Users cannot act on it.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    # On CPUs DeepSpeed first compiles a shared-memory all-reduce (comm/torch.py, build_shm_op). This takes half a
    # minute and needs a compiler, but only inference calls it. This entry marks the op as not available.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed joins the existing process group. Without the flag it would search for MPI if MASTER_ADDR is not set.
    deepspeed.init_distributed(get_accelerator().communication_backend_name(), auto_mpi_discovery=False)
    ops.prepare_builds()
    nvme.prepare_swapping(rundir, settings)
    strategy = _build_strategy(rundir)
    model = strategy.build(settings)
    parameters = _parameter_groups(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_client_optimizer(parameters, rundir.plan.job),
        model_parameters=parameters,
        config=settings,
        mpu=strategy.mpu,
    )
    try:
        _check_engine(engine, rundir)
    except EngineError:
        release(engine, strategy, rundir)
        raise
    return engine, strategy


def parameter_state(engine: deepspeed.DeepSpeedEngine) -> ParameterState:
    """The ``ParameterState`` for the optimizer that DeepSpeed chose (engine.py, _configure_optimizer)."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
            return NvmeState(engine)
        return FullyPartitionedState(engine)
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        return PartitionedState(engine)
    if optimizer is engine.basic_optimizer or isinstance(optimizer, FP16_UnfusedOptimizer):
        return UnshardedState(engine)
    raise EngineError(
        f"DeepSpeed chose {type(optimizer).__name__}, whose state this engine cannot read; "
        "keep the optimizer and bf16 sections of ds_config.json as they were emitted"
    )


def release(engine: deepspeed.DeepSpeedEngine, strategy: ModelParallelStrategy, rundir: RunDirectory) -> None:
    """Release hooks, buffers and swap files, and clear DeepSpeed's module globals of process groups: the caller may
    destroy these groups, and the next engine must not find them."""
    engine.destroy()
    nvme.remove_swap_files(rundir)
    groups._release_process_group_references(group=None)
    strategy.close()


def _build_strategy(rundir: RunDirectory) -> ModelParallelStrategy:
    """The strategy that a plan names."""
    layout = rundir.plan.layout
    if layout.implementation == "local":
        from kit.engines.deepspeed.over_megatron import MegatronTensorParallel

        return MegatronTensorParallel(rundir)
    if layout.tp > 1:
        from kit.engines.deepspeed.autotp import AutoTensorParallel

        return AutoTensorParallel(rundir)
    if layout.cp > 1:
        from kit.engines.deepspeed.ulysses import UlyssesSequenceParallel

        return UlyssesSequenceParallel(rundir)
    return DataParallel(rundir)


def _parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices with the configured weight decay, one-dimensional parameters (norms, biases) without any.

    Under zero.Init a parameter's ``shape`` is empty; ``ds_shape`` is the shape of the whole parameter.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) > 1]
    rest = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) <= 1]
    return [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]


def _client_optimizer(groups: list[dict[str, Any]], job: JobSpec) -> torch.optim.Optimizer | None:
    """An optimizer that DeepSpeed does not have, so that ds_config.json cannot name it; None for the others."""
    in_8_bits = job.optimizer.name.endswith("-8bit")
    return EightBitAndVectors(groups, job.optimizer, job.learning_rate) if in_8_bits else None


def _complete_environment() -> None:
    """Set the environment variables that a launcher sets. zero.Init reads LOCAL_RANK, and DeepSpeed searches for MPI
    if one is missing."""
    defaults = {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _check_settings(settings: dict[str, Any]) -> None:
    """Refuse edits of ds_config.json that DeepSpeed accepts but that would silently give wrong results here."""
    zero = settings.get("zero_optimization", {})
    for wrong, why in (
        (
            zero.get("zenflow"),
            "zero_optimization.zenflow: DeepSpeed 0.19.8 flattens matrices transposed and reads them back in another "
            "order (stage_1_and_2.py, _update_model_bit16_weights), so every weight is in the wrong place; remove it",
        ),
        (
            (zero.get("offload_optimizer") or {}).get("super_offload"),
            "offload_optimizer.super_offload=true: it keeps the moments in a process of its own, where no "
            "checkpoint finds them; remove it, or use ds_config.superoffload.json with your own script",
        ),
        (
            settings.get("compile", {}).get("deepcompile"),
            "compile.deepcompile=true: this engine does not call engine.compile(), without which DeepSpeed ignores the "
            "key; remove it, or use ds_config.deepcompile.json with a script of your own",
        ),
        (
            zero.get("round_robin_gradients"),
            "zero_optimization.round_robin_gradients=true: DeepSpeed then maps parameters to the wrong parts of the "
            "master weights when they are exported (stage_1_and_2.py, _link_all_hp_params); remove the key",
        ),
        (
            settings.get("managed_gradient_accumulation", True) is False,
            "managed_gradient_accumulation=false: this engine marks the last micro batch itself; remove the key",
        ),
        (
            settings.get("checkpoint", {}).get("load_universal"),
            "checkpoint.load_universal=true: DeepSpeed reads universal checkpoints with pickle, which runs what a file "
            "says; remove the key and resume from a checkpoint of kit, which fits every layout",
        ),
        (
            "scheduler" in settings,
            "scheduler: the learning rate is a function of the samples seen; use run.schedule instead",
        ),
    ):
        if wrong:
            raise EngineError(why)


def _check_engine(engine: Any, rundir: RunDirectory) -> None:
    """Raises EngineError if the engine's class, parallel sizes, device, precision or offload differ from the plan:
    launchers and wrappers of DeepSpeed fall back silently."""
    layout, cluster = rundir.plan.layout, rundir.plan.cluster
    offload = {"cpu": "cpu", "nvme": "nvme", "none": None}
    found_and_planned = {
        "engine": (type(engine).__name__, "DeepSpeedEngine"),
        "zero_stage": (int(engine.zero_optimization_stage()), layout.zero_stage),
        "dp": (int(engine.seq_dp_world_size) // int(engine.sequence_parallel_size), layout.dp),
        "world_size": (dist.get_world_size(), layout.world_size),
        "device": (get_accelerator().device_name(), cluster.gpu.device),
        "precision": (_precision(engine), rundir.plan.job.precision),
        "autocast": (bool(engine.torch_autocast_enabled()), layout.autocast),
        "offload_optimizer": (_offload_device(engine.zero_offload_optimizer()), offload[layout.offload_optimizer]),
        "offload_param": (_offload_device(engine.zero_offload_param()), offload[layout.offload_param]),
    }
    for what, (found, planned) in found_and_planned.items():
        if found != planned:
            raise EngineError(
                f"{what}={found} was started where the plan has {planned}; "
                "start the run with launch.sh, and DS_ACCELERATOR=cpu on a machine without GPUs"
            )


def _precision(engine: Any) -> str:
    if engine.fp16_enabled():
        return "fp16"
    return "bf16" if engine.bfloat16_enabled() or engine.torch_autocast_enabled() else "fp32"


def _offload_device(config: Any) -> str | None:
    # A default value is an enum, a configured value is a string (pydantic, use_enum_values).
    device = "none" if config is None else getattr(config.device, "value", config.device)
    return None if device == "none" else str(device)
