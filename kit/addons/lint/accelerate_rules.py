"""Rules of accelerate's YAML: keys, contradictions with its DeepSpeed file, and settings that silently start something
else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kit.addons.lint import consequence_rules
from kit.addons.lint.config import Config, removal, setting
from kit.addons.lint.finding import Finding
from kit.addons.lint.fix import changed
from kit.addons.lint.key_rules import unknown_keys
from kit.addons.lint.known_keys import known_keys, layer_classes
from kit.addons.lint.rule import Case, Each, Rule, check, table
from kit.specs.model import ModelSpec

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
TORCH_CLASSES = {"Linear", "Embedding", "LayerNorm"}
_WRAPPED = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
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
    """accelerate refuses an unknown key at the top level and ignores it inside a section."""
    for finding in unknown_keys(config, known_keys("accelerate")):
        section, _, key = finding.key.rpartition(".")
        is_prefixed = section == "fsdp_config" and f"fsdp_{key}" in (known_keys("accelerate").inside((section,)) or {})
        if not is_prefixed:  # launch.py adds the prefix itself
            yield finding


def _processes(config: Config) -> float:
    return config.number("num_processes") or 1


def _machines(config: Config) -> float:
    return config.number("num_machines") or 1


def _rank(config: Config) -> float:
    return config.number("machine_rank") or 0


def _one_process(config: Config) -> bool:
    """Whether the distributed type silently runs one process."""
    alone = config.get("distributed_type") in ("MULTI_CPU", "NO") and not config.section("mpirun_config")
    return alone and _processes(config) > 1


def _visible(config: Config) -> int:
    return len(str(config.get("gpu_ids")).split(","))


def _too_few_visible(config: Config) -> bool:
    """Whether there are fewer visible devices than processes. utils/launch.py sets CUDA_VISIBLE_DEVICES to gpu_ids, and
    each process uses the device of its local rank."""
    if config.get("gpu_ids") in (None, "all") or config.on("use_cpu"):
        return False
    return _visible(config) < _processes(config) // _machines(config)


def _decided_by_file(key: str) -> Case[Config]:
    """accelerate refuses to start if its YAML and the DeepSpeed file both set ``key``."""
    return Case(
        "error",
        key,
        lambda c: (
            c.get("distributed_type") == "DEEPSPEED"
            and c.get("deepspeed_config.deepspeed_config_file")
            and (c.get(key) is not None if key == "mixed_precision" else c.has(key))
        ),
        "decided by the deepspeed_config_file, beside which accelerate refuses it",
        "remove it here",
        removal(key),
    )


def missing_classes(named: object, model: ModelSpec | None) -> Iterator[tuple[str, str]]:
    """(why, fix) for every class name in ``named`` (comma-separated) that the model's family does not define."""
    known = layer_classes().get(model.family, frozenset()) if model is not None else frozenset()
    for name in str(named).split(",") if known and named else ():
        if name.strip() not in known | TORCH_CLASSES:
            layers = sorted(each for each in known if each.endswith(("Layer", "Block")))
            assert model is not None
            yield f"{name.strip()} is no class of {model.name}", f"write {', '.join(layers)}"


table(
    "accelerate",
    {
        # config_args.py, process_config
        Rule("distributed-type", "accelerate", "no `distributed_type`", "refused"): (
            Case(
                "error",
                "",
                lambda c: not c.has("distributed_type"),
                "distributed_type is missing",
                "add distributed_type: DEEPSPEED, FSDP or MULTI_GPU",
            ),
        ),
        Rule(
            "one-process",
            "accelerate, script",
            "types and launch lines that start one process and end with exit code 0",
            "trains on one GPU without a warning",
        ): (
            Case(
                "error",
                "distributed_type",
                _one_process,
                lambda c: (
                    f"{c.get('distributed_type')} starts one process, not {_processes(c):g}, and ends with exit code 0"
                ),
                "use MULTI_GPU, DEEPSPEED or FSDP, or torchrun on CPUs",
            ),
        ),
        # Several machines need an address and a rank each.
        Rule("machine-rank", "accelerate, script", "a rank beyond the number of machines", "hangs"): (
            Case(
                "error",
                "machine_rank",
                lambda c: _rank(c) >= _machines(c),
                lambda c: f"rank {_rank(c):g} of {_machines(c):g} machines",
                lambda c: f"ranks go from 0 to {_machines(c) - 1:g}; start each machine with its own --machine_rank",
            ),
        ),
        Rule("main-process-ip", "accelerate, script", "several machines without an address", "each waits for itself"): (
            Case(
                "warning",
                "num_machines",
                lambda c: _machines(c) > 1 and not c.get("main_process_ip"),
                lambda c: f"{_machines(c):g} machines and no main_process_ip: each waits for itself",
                "add the first machine's address, or give --main_process_ip at start",
            ),
            Case(
                "error",
                "main_process_ip",
                lambda c: _machines(c) > 1 and c.get("main_process_ip") in LOOPBACK and not c.section("mpirun_config"),
                lambda c: (
                    f"{_machines(c):g} machines that meet at {c.get('main_process_ip')}: each finds itself there alone"
                ),
                "use the first machine's address",
            ),
        ),
        Rule(
            "processes-per-machine",
            "accelerate",
            "a number of processes that the machines do not divide",
            "refused",
        ): (
            Case(
                "error",
                "num_processes",
                lambda c: (c.number("num_processes") or 0) % _machines(c),
                lambda c: (
                    f"{_processes(c):g} processes on {_machines(c):g} machines: it is the number on all machines "
                    "together"
                ),
                lambda c: f"use a multiple of {_machines(c):g}",
            ),
        ),
        Rule("decided-by-file", "accelerate", "a key that the DeepSpeed file decides too", "refused"): (
            *(_decided_by_file(f"deepspeed_config.{key}") for key in DECIDED_BY_FILE),
            _decided_by_file("mixed_precision"),
        ),
        # utils/dataclasses.py, set_auto_wrap_policy: a class that is not found is an exception.
        Rule(
            "wrap-class", "accelerate, script, with a model", "a layer class that the model does not have", "refused"
        ): (
            Each(
                "error",
                _WRAPPED,
                lambda c: missing_classes(c.get(_WRAPPED), c.model),
                lambda c, missing: missing[0],
                lambda c, missing: missing[1],
            ),
        ),
        Rule("visible-devices", "accelerate, script", "fewer GPUs visible than processes on a machine", "it stops"): (
            Case(
                "error",
                "gpu_ids",
                _too_few_visible,
                lambda c: (
                    f"{_visible(c)} visible, and {_processes(c) // _machines(c):g} processes on a machine take one each"
                ),
                lambda c: f"write num_processes: {_visible(c)}, or gpu_ids: all",
            ),
        ),
    },
)


@check("accelerate")
def priced(config: Config) -> Iterator[Finding]:
    """Checks memory as for a DeepSpeed file, with the configuration that accelerate derives from its section."""
    kind = config.get("distributed_type")
    if kind == "DEEPSPEED" and config.get("deepspeed_config.deepspeed_config_file"):
        return  # the DeepSpeed file is checked separately
    made = as_deepspeed(config) if kind == "DEEPSPEED" else config
    for finding in consequence_rules.consequences(made):
        key = FROM_YAML.get(finding.key, "deepspeed_config") if kind == "DEEPSPEED" else "distributed_type"
        yield replace(finding, key=finding.key and key, line=config.line(key), changes=())


FROM_YAML = {
    "zero_optimization.stage": "deepspeed_config.zero_stage",
    "zero_optimization.offload_optimizer.device": "deepspeed_config.offload_optimizer_device",
    "zero_optimization.offload_param.device": "deepspeed_config.offload_param_device",
    "gradient_accumulation_steps": "deepspeed_config.gradient_accumulation_steps",
}
"""Mapping between accelerate's keys and those of a DeepSpeed file (utils/dataclasses.py,
DeepSpeedPlugin.__post_init__)."""


def as_deepspeed(config: Config) -> Config:
    """The DeepSpeed configuration that accelerate derives from its YAML. The default stage is 2."""
    given = {dotted: config.get(key) for dotted, key in FROM_YAML.items() if config.get(key) not in (None, "none")}
    mixed = config.get("mixed_precision")
    given |= {f"{mixed}.enabled": True} if mixed in ("fp16", "bf16") else {}
    changes = tuple((tuple(dotted.split(".")), value) for dotted, value in given.items())
    data = changed({"zero_optimization": {"stage": 2}}, changes)
    return replace(config, document=replace(config.document, data=data, lines={}), reader="accelerate")


def _inline_stage(config: Config) -> float | None:
    """ZeRO stage of DeepSpeed settings inside accelerate's YAML."""
    inline = config.get("distributed_type") == "DEEPSPEED"
    return config.number("deepspeed_config.zero_stage") if inline else None


def _without_path(config: Config) -> list[str]:
    """What DeepSpeed settings inside accelerate's YAML offload to NVMe, and not where."""
    inline = config.section("deepspeed_config") if _inline_stage(config) is not None else {}
    on_nvme = [name for name in ("param", "optimizer") if inline.get(f"offload_{name}_device") == "nvme"]
    return [name for name in on_nvme if not inline.get(f"offload_{name}_nvme_path")]


table(
    "accelerate",
    {
        "nvme-path": (
            Each(
                "error",
                lambda c, name: f"deepspeed_config.offload_{name}_device",
                _without_path,
                "nvme without a path",
                lambda c, name: f"add offload_{name}_nvme_path, a directory on every node's own disk",
            ),
        ),
        "offload-stage": (
            Case(
                "error",
                "deepspeed_config.offload_param_device",
                lambda c: (
                    _inline_stage(c) not in (None, 3)
                    and c.get("deepspeed_config.offload_param_device") in ("cpu", "nvme")
                ),
                lambda c: (
                    f"only stage 3 partitions parameters, so that at stage {_inline_stage(c):g} they stay on the GPU"
                ),
                "use zero_stage: 3, or none",
                setting("deepspeed_config.offload_param_device", "none"),
            ),
        ),
        "gather-on-save": (
            Case(
                "warning",
                "deepspeed_config.zero_stage",
                lambda c: _inline_stage(c) == 3 and not c.on("deepspeed_config.zero3_save_16bit_model"),
                "at stage 3 Accelerator.get_state_dict refuses to save a model without zero3_save_16bit_model",
                "add zero3_save_16bit_model: true",
                setting("deepspeed_config.zero3_save_16bit_model", True),
            ),
        ),
        "other-stage-key": (
            Case(
                "warning",
                "deepspeed_config.zero3_init_flag",
                lambda c: _inline_stage(c) not in (None, 3) and c.on("deepspeed_config.zero3_init_flag"),
                lambda c: f"read at stage 3 only, and the stage is {_inline_stage(c):g}",
                "write false",
                setting("deepspeed_config.zero3_init_flag", False),
            ),
        ),
    },
)
