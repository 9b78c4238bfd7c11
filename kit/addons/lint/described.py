"""Converts a configuration to a workload of the cost model, with the sizes in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from kit.addons.lint.batch_rules import data_parallel_size
from kit.addons.lint.config import AUTO, Config, truth
from kit.cost.memory.deepspeed_sizes import buffer_sizes
from kit.cost.workload import Workload
from kit.errors import SpecError
from kit.specs.job import JobSpec, Precision
from kit.specs.layout import ZERO_KEYS, Layout, Offload
from kit.specs.text import listed, refuse

NEEDS_BOTH = "memory needs both a model and GPUs"


def described(config: Config) -> Workload:
    """The workload of a configuration. Raises ``SpecError`` with the reason why memory cannot be judged."""
    model, cluster = config.model, config.cluster
    if model is None or cluster is None:
        raise SpecError(NEEDS_BOTH)
    try:
        layout = _fsdp_layout(config) if config.has("distributed_type") else _layout(config)
        if layout.world_size > cluster.num_gpus:
            raise SpecError(f"{layout.world_size} processes, and {cluster.name} has {cluster.num_gpus} GPUs")
        job = JobSpec(
            precision=precision(config),
            seq_length=config.seq_length or min(4096, model.max_position_embeddings),
            global_batch_size=layout.global_batch_size,
        )
    except ValueError as error:
        raise SpecError(f"a number is out of its range: {' '.join(str(error).split())[:200]}") from None
    unit = "model" if one_fsdp_unit(config) else "layer"
    workload = ProgramWorkload(model, cluster, job, layout, fsdp_unit=unit)
    given = {name: _given_size(config, name) for name in ZERO_KEYS}
    return workload.with_layout(layout.but(**zero_sizes(given, workload, config.reader != "deepspeed")))


@dataclass(frozen=True)
class ProgramWorkload(Workload):
    """A workload in what other programs choose and no plan of kit's does."""

    cross_entropy: str = "unfused"
    """Megatron's loss, by the names of ``rank_megatron.MEGATRON_LOSSES``."""
    loss_chunks: int = 0
    """Parts of a micro batch in which torchtitan has the logits; 0: kit's own chunks."""
    fsdp_unit: str = "layer"
    """What FSDP gathers at once."""

    @property
    def chunk_tokens(self) -> float:
        """Tokens whose logits take as much in kit's chunked loss. torchtitan runs torch's cross entropy in each chunk:
        log-probabilities and two gradients are twice kit's bytes (components/loss.py, ChunkedLossWrapper)."""
        return 2 * self.tokens / self.loss_chunks if self.chunked_loss and self.loss_chunks else super().chunk_tokens

    def with_layout(self, layout: Layout) -> ProgramWorkload:
        return replace(self, layout=layout)


def wrap_policy(config: Config) -> str:
    """FSDP's wrap policy; accelerate adds the prefix of a key, and takes NO_WRAP where there is none."""
    fsdp = config.section("fsdp_config")
    given = fsdp.get("fsdp_auto_wrap_policy", fsdp.get("auto_wrap_policy"))
    return "NO_WRAP" if given is None else str(given).upper()


def one_fsdp_unit(config: Config) -> bool:
    """Whether FSDP shards the model, and gathers it as one group."""
    shards = config.get("distributed_type") == "FSDP" and fsdp_stage(config) != 0
    groups = {"NO_WRAP": True, "SIZE_BASED_WRAP": config.number("fsdp_config.fsdp_min_num_params") == 0}
    return shards and groups.get(wrap_policy(config), False)


def precision(config: Config) -> Precision:
    """Precision of weights and activations."""
    mixed = config.get("mixed_precision")
    if mixed == "fp16" or (mixed != "bf16" and config.on("fp16.enabled")):
        return "fp16"
    is_bf16 = mixed == "bf16" or config.on("bf16.enabled") or config.get("bf16.enabled") == AUTO
    return "bf16" if is_bf16 else "fp32"


def _layout(config: Config) -> Layout:
    """Layout of a DeepSpeed configuration, with the sizes in it. Raises ``SpecError``."""
    ranks, stage = data_parallel_size(config), config.stage
    offload = {
        f"offload_{name}": config.get(f"zero_optimization.offload_{name}.device", "none")
        for name in ("optimizer", "param")
    }
    refuse(
        {
            "the cost model has no figures for a Hugging Face model whose tensors or sequences are split": (
                config.number("tensor_parallel.autotp_size") or config.number("sequence_parallel_size")
            ),
            "the number of ranks or the ZeRO stage is not a number here": ranks is None or stage not in range(4),
            f"offload to {listed(map(str, offload.values()), ' and ')} is not known here": any(
                device not in get_args(Offload) for device in offload.values()
            ),
        }
    )
    return Layout(
        engine="deepspeed",
        implementation="huggingface",
        dp=ranks or 1,
        zero_stage=stage or 0,
        recompute="full" if config.gradient_checkpointing else "none",
        micro_batch_size=max(1, int(config.number("train_micro_batch_size_per_gpu") or 1)),
        gradient_accumulation_steps=max(1, int(config.number("gradient_accumulation_steps") or 1)),
        optimizer_state_dtype="bf16" if config.on("bf16.bf16_optimizer_states") else "fp32",
        **offload,
    )


DEFAULT_SIZES = {
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
    "stage3_param_persistence_threshold": 1e5,
    "sub_group_size": 1e9,
    "optimizer_buffer_count": 4,
    "param_buffer_count": 5,
    "param_buffer_size": 1e8,
}
"""``Layout`` field → DeepSpeed's default size (runtime/zero/config.py, offload_config.py)."""
_LARGEST_SIZE = 10**15


def zero_sizes(given: Mapping[str, Any], workload: Workload, fills_auto: bool = True) -> dict[str, int | None]:
    """Every DeepSpeed size that the stage and the offload read: the given one; for "auto" that of Trainer and
    accelerate (hidden size squared, nine tenths of it, ten hidden sizes: transformers/integrations/deepspeed.py); else
    DeepSpeed's default."""
    model, hidden = workload.model, workload.model.hidden_size
    filled = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": 0.9 * hidden * hidden,
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    # DeepSpeed's default stands for what is not given, and for "auto" where nobody fills it
    known = {None: DEFAULT_SIZES, "auto": DEFAULT_SIZES | (filled if fills_auto else {})}
    stated: dict[str, Any] = {name: given.get(name) for name in buffer_sizes(model, workload.cluster, workload.layout)}
    sizes = {name: known[value][name] if value in known else float(value) for name, value in stated.items()}
    return {name: int(min(max(size, name.endswith("count")), _LARGEST_SIZE)) for name, size in sizes.items()}


def _given_size(config: Config, name: str) -> Any:
    key = f"zero_optimization.{ZERO_KEYS[name]}"
    plain = key.replace("stage3_", "")  # DeepSpeed takes both names
    value = next((v for v in (config.number(key), config.number(plain)) if v is not None), None)
    return "auto" if value is None and "auto" in (config.get(key), config.get(plain)) else value


_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
"""FSDP1's sharding strategy, by name or number → ZeRO stage."""


def fsdp_stage(config: Config) -> int | None:
    if config.number("fsdp_config.fsdp_version") == 2:
        return 2 if truth(config.get("fsdp_config.fsdp_reshard_after_forward", True)) is False else 3
    return _STAGES.get(str(config.get("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD")).upper())


def _fsdp_layout(config: Config) -> Layout:
    """Layout of accelerate's YAML without DeepSpeed: FSDP and DDP. Raises ``SpecError``."""
    kind, ranks = config.get("distributed_type"), data_parallel_size(config)
    stage = fsdp_stage(config) if kind == "FSDP" else 0
    saves = config.gradient_checkpointing or config.on("fsdp_config.fsdp_activation_checkpointing")
    no_figures = {
        f"distributed_type {kind} of accelerate": kind not in ("FSDP", "MULTI_GPU") or ranks is None,
        "FSDP with offload, or beside other kinds of parallelism": (
            kind == "FSDP" and (config.on("fsdp_config.fsdp_offload_params") or config.section("parallelism_config"))
        ),
        str(config.get("fsdp_config.fsdp_sharding_strategy")): stage is None,
    }
    refuse({f"the cost model has no figures for {what}": holds for what, holds in no_figures.items()})
    return Layout(
        engine="torch",
        implementation="huggingface",
        dp=ranks or 1,
        zero_stage=stage or 0,
        recompute="full" if saves else "none",
    )
