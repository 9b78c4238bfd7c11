"""accelerate's YAML: keys, what contradicts the DeepSpeed file it names, and what starts something else silently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kit.diagnose.lint import consequence_rules
from kit.diagnose.lint.config import Config, removal, setting
from kit.diagnose.lint.finding import Finding
from kit.diagnose.lint.key_rules import unknown_keys
from kit.diagnose.lint.known_keys import accelerate_keys, layer_classes
from kit.diagnose.lint.rule import Rule, check
from kit.specs.model import ModelSpec

DECIDED_BY_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""accelerate/utils/dataclasses.py, _deepspeed_config_checks: refused beside deepspeed_config_file."""


@check("accelerate")
def accelerate_unknown_key(config: Config) -> Iterator[Finding]:
    """At the top level accelerate refuses it; inside a section nothing looks at it."""
    prefixes = {"fsdp_config": "fsdp_"}
    for finding in unknown_keys(config, accelerate_keys(), "unknown-key"):
        section, _, key = finding.key.rpartition(".")
        known = accelerate_keys().inside((section,)) or {}
        if prefixes.get(section, "?") + key not in known:  # launch.py adds the prefix itself
            yield finding


@check(
    "accelerate",
    Rule("distributed-type", "accelerate", "no `distributed_type`", "refused"),
    Rule(
        "one-process",
        "accelerate, script",
        "types and launch lines that start one process and end with exit code 0",
        "trains on one GPU without a warning",
    ),
)
def distributed_type(config: Config) -> Iterator[Finding]:
    """config_args.py, process_config; and the types that run one process without a word."""
    if not config.has("distributed_type"):
        yield config.finding(
            "distributed-type",
            "error",
            "",
            "distributed_type is missing",
            "add distributed_type: DEEPSPEED, FSDP or MULTI_GPU",
        )
    processes = config.number("num_processes") or 1
    kind = config.get("distributed_type")
    if kind in ("MULTI_CPU", "NO") and processes > 1 and not config.section("mpirun_config"):
        yield config.finding(
            "one-process",
            "error",
            "distributed_type",
            f"{kind} starts one process, not {processes:g}, and ends with exit code 0",
            "use MULTI_GPU, DEEPSPEED or FSDP, or torchrun on CPUs",
        )


@check(
    "accelerate",
    Rule("machine-rank", "accelerate, script", "a rank beyond the number of machines", "hangs"),
    Rule("main-process-ip", "accelerate, script", "several machines without an address", "each waits for itself"),
    Rule("processes-per-machine", "accelerate", "a number of processes that the machines do not divide", "refused"),
)
def machines(config: Config) -> Iterator[Finding]:
    """Several machines need an address and a rank each."""
    number = config.number("num_machines") or 1
    rank = config.number("machine_rank") or 0
    if rank >= number:
        yield config.finding(
            "machine-rank",
            "error",
            "machine_rank",
            f"rank {rank:g} of {number:g} machines",
            f"ranks go from 0 to {number - 1:g}; start each machine with its own --machine_rank",
        )
    if number > 1 and not config.get("main_process_ip"):
        yield config.finding(
            "main-process-ip",
            "warning",
            "num_machines",
            f"{number:g} machines and no main_process_ip: each waits for itself",
            "add the first machine's address, or give --main_process_ip at start",
        )
    processes = config.number("num_processes")
    if processes is not None and processes % number:
        yield config.finding(
            "processes-per-machine",
            "error",
            "num_processes",
            f"{processes:g} processes on {number:g} machines: it is the number on all machines together",
            f"use a multiple of {number:g}",
        )


@check(
    "accelerate",
    Rule("decided-by-file", "accelerate", "a key that the DeepSpeed file decides too", "refused"),
)
def decided_by_file(config: Config) -> Iterator[Finding]:
    """accelerate refuses to start when both speak."""
    if not config.get("deepspeed_config.deepspeed_config_file") or config.get("distributed_type") != "DEEPSPEED":
        return
    doubled = [f"deepspeed_config.{key}" for key in DECIDED_BY_FILE if config.has(f"deepspeed_config.{key}")]
    doubled += ["mixed_precision"] if config.get("mixed_precision") is not None else []
    for dotted in doubled:
        yield config.finding(
            "decided-by-file",
            "error",
            dotted,
            "decided by the deepspeed_config_file, beside which accelerate refuses it",
            "remove it here",
            removal(dotted),
        )


@check(
    "accelerate",
    Rule("visible-devices", "accelerate, script", "fewer GPUs visible than processes on a machine", "it stops"),
)
def visible_devices(config: Config) -> Iterator[Finding]:
    """utils/launch.py hands gpu_ids on as CUDA_VISIBLE_DEVICES; a rank takes the device of its local number."""
    ids, processes = config.get("gpu_ids"), config.number("num_processes")
    if ids in (None, "all") or processes is None or config.on("use_cpu"):
        return
    visible, each = len(str(ids).split(",")), processes // (config.number("num_machines") or 1)
    if visible < each:
        yield config.finding(
            "visible-devices",
            "error",
            "gpu_ids",
            f"{visible} visible, and {each:g} processes on a machine take one each",
            f"write num_processes: {visible}, or gpu_ids: all",
        )


@check(
    "accelerate",
    Rule("wrap-class", "accelerate, script, with a model", "a layer class that the model does not have", "refused"),
)
def wrap_class(config: Config) -> Iterator[Finding]:
    """utils/dataclasses.py, set_auto_wrap_policy: a class that is not found is an exception."""
    key = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
    for why, fix in missing_classes(config.get(key), config.model):
        yield config.finding("wrap-class", "error", key, why, fix)


def missing_classes(named: object, model: ModelSpec | None) -> Iterator[tuple[str, str]]:
    """(why, fix) of every class among these, separated by commas, that the model's family does not define."""
    known = layer_classes().get(model.family, frozenset()) if model is not None else frozenset()
    for name in str(named).split(",") if known and named else ():
        if name.strip() not in known | TORCH_CLASSES:
            layers = sorted(each for each in known if each.endswith(("Layer", "Block")))
            assert model is not None
            yield f"{name.strip()} is no class of {model.name}", f"write {', '.join(layers)}"


TORCH_CLASSES = {"Linear", "Embedding", "LayerNorm"}


@check("accelerate")
def priced(config: Config) -> Iterator[Finding]:
    """Judges memory as for a DeepSpeed file, from what accelerate makes of its section."""
    kind = config.get("distributed_type")
    if kind == "DEEPSPEED" and config.get("deepspeed_config.deepspeed_config_file"):
        return  # that file is judged by itself
    made = as_deepspeed(config) if kind == "DEEPSPEED" else config
    for rule in (consequence_rules.memory, consequence_rules.speed):
        for finding in rule(made):
            key = FROM_YAML.get(finding.key, "deepspeed_config") if kind == "DEEPSPEED" else "distributed_type"
            yield replace(finding, key=finding.key and key, line=config.line(key), changes=())


FROM_YAML = {
    "zero_optimization.stage": "deepspeed_config.zero_stage",
    "zero_optimization.offload_optimizer.device": "deepspeed_config.offload_optimizer_device",
    "zero_optimization.offload_param.device": "deepspeed_config.offload_param_device",
    "gradient_accumulation_steps": "deepspeed_config.gradient_accumulation_steps",
}
"""Keys of a DeepSpeed file ← accelerate's (utils/dataclasses.py, DeepSpeedPlugin.__post_init__)."""


def as_deepspeed(config: Config) -> Config:
    """The DeepSpeed configuration that accelerate makes of its YAML; its stage is 2 unless said."""
    data: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    for dotted, key in FROM_YAML.items():
        if config.get(key) not in (None, "none"):
            *sections, last = dotted.split(".")
            node = data
            for section in sections:
                node = node.setdefault(section, {})
            node[last] = config.get(key)
    mixed = config.get("mixed_precision")
    data |= {mixed: {"enabled": True}} if mixed in ("fp16", "bf16") else {}
    document = replace(config.document, data=data, lines={})
    processes = config.number("num_processes")
    given = replace(config.given, reader="accelerate")
    return Config(document, given=given, processes=None if processes is None else int(processes))


@check("accelerate")
def inline_zero(config: Config) -> Iterator[Finding]:
    """Checks of DeepSpeed settings that stand in accelerate's YAML, not in a file of their own."""
    stage = config.number("deepspeed_config.zero_stage")
    if config.get("distributed_type") != "DEEPSPEED" or stage is None:
        return
    for name in ("param", "optimizer"):
        device = config.get(f"deepspeed_config.offload_{name}_device")
        if device == "nvme" and not config.get(f"deepspeed_config.offload_{name}_nvme_path"):
            yield config.finding(
                "nvme-path",
                "error",
                f"deepspeed_config.offload_{name}_device",
                "nvme without a path",
                f"add offload_{name}_nvme_path, a directory on every node's own disk",
            )
    if config.get("deepspeed_config.offload_param_device") in ("cpu", "nvme") and stage != 3:
        yield config.finding(
            "offload-stage",
            "error",
            "deepspeed_config.offload_param_device",
            f"only stage 3 partitions parameters, so that at stage {stage:g} they stay on the GPU",
            "use zero_stage: 3, or none",
            setting("deepspeed_config.offload_param_device", "none"),
        )
    if stage == 3 and not config.on("deepspeed_config.zero3_save_16bit_model"):
        yield config.finding(
            "gather-on-save",
            "warning",
            "deepspeed_config.zero_stage",
            "at stage 3 Accelerator.get_state_dict refuses to save a model without zero3_save_16bit_model",
            "add zero3_save_16bit_model: true",
            setting("deepspeed_config.zero3_save_16bit_model", True),
        )
    if stage != 3 and config.on("deepspeed_config.zero3_init_flag"):
        yield config.finding(
            "other-stage-key",
            "warning",
            "deepspeed_config.zero3_init_flag",
            f"read at stage 3 only, and the stage is {stage:g}",
            "write false",
            setting("deepspeed_config.zero3_init_flag", False),
        )


@check("accelerate", Rule("fsdp2-key", "accelerate", "keys of FSDP1 under version 2", "refused or ignored"))
def fsdp_versions(config: Config) -> Iterator[Finding]:
    """accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin: keys that FSDP2 does not have."""
    if config.number("fsdp_config.fsdp_version") != 2:
        return
    if config.get("fsdp_config.fsdp_forward_prefetch"):
        yield config.finding(
            "fsdp2-key",
            "error",
            "fsdp_config.fsdp_forward_prefetch",
            "refused with fsdp_version 2",
            "remove it",
            removal("fsdp_config.fsdp_forward_prefetch"),
        )
    for key in ("fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_sharding_strategy", "fsdp_backward_prefetch"):
        dotted = f"fsdp_config.{key}"
        if config.has(dotted):
            yield config.finding(
                "fsdp2-key",
                "warning",
                dotted,
                "of FSDP1; version 2 has no such choice",
                "use fsdp_reshard_after_forward" if key == "fsdp_sharding_strategy" else "remove it",
                removal(dotted),
            )
