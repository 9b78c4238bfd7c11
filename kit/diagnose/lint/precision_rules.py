"""Precision and optimizer: contradictions, and what the hardware does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kit.diagnose.lint.config import Config, removal, setting
from kit.diagnose.lint.finding import Finding
from kit.diagnose.lint.rule import Rule, check

GPU_ONLY_OPTIMIZERS = ("lamb",)
"""Optimizers of DeepSpeed that have no CPU form (runtime/engine.py, _configure_basic_optimizer)."""
ZERO_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "muon")
"""Names whose classes ZeRO takes without zero_allow_untested_optimizer (runtime/zero/utils.py)."""
REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb", "1bitadam", "1bitlamb", "01adam")
"""Compressed optimizers, gone with the communication backends that they needed."""
SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""runtime/lr_schedules.py, VALID_LR_SCHEDULES; other names must be those of torch.optim.lr_scheduler."""


@check("deepspeed", Rule("two-precisions", "ds", "fp16 and bf16 at once", "refused"))
def two_precisions(config: Config) -> Iterator[Finding]:
    """runtime/config.py asserts that one of them is off."""
    if config.on("fp16.enabled") and config.on("bf16.enabled"):
        keep = "fp16" if config.cluster is not None and not config.cluster.gpu.bf16_tflops else "bf16"
        drop = "bf16" if keep == "fp16" else "fp16"
        yield config.finding(
            "two-precisions",
            "error",
            "fp16.enabled",
            "fp16 and bf16 are both on, and DeepSpeed takes one",
            f"keep {keep}",
            setting(f"{drop}.enabled", False),
        )


@check("deepspeed", Rule("bf16-hardware", "ds", "bf16 on Turing and older", "emulated, many times slower"))
def bf16_hardware(config: Config) -> Iterator[Finding]:
    """Volta and Turing have no bf16 units."""
    cluster = config.cluster
    if (
        cluster is not None
        and config.on("bf16.enabled")
        and cluster.gpu.device == "cuda"
        and not cluster.gpu.bf16_tflops
    ):
        yield config.finding(
            "bf16-hardware",
            "error",
            "bf16.enabled",
            f"{cluster.gpu.name} has no bf16 units",
            "use fp16 with its loss scaling",
            (*setting("bf16.enabled", False), *setting("fp16.enabled", True)),
        )


@check("deepspeed", Rule("static-loss-scale", "ds", "a fixed fp16 scale", "overflows as training goes on"))
def static_loss_scale(config: Config) -> Iterator[Finding]:
    """A fixed scale overflows or underflows as training goes on; 0 is DeepSpeed's word for dynamic."""
    scale = config.number("fp16.loss_scale")
    if config.on("fp16.enabled") and scale:
        yield config.finding(
            "static-loss-scale",
            "warning",
            "fp16.loss_scale",
            f"a fixed scale of {scale:g}: gradients that outgrow it overflow, step after step",
            "use 0, which scales dynamically",
            setting("fp16.loss_scale", 0),
        )


@check(
    "deepspeed",
    Rule("bf16-accumulation", "ds", "many micro batches added up in bf16", "the later ones are lost to rounding"),
)
def bf16_accumulation(config: Config) -> Iterator[Finding]:
    """DeepSpeed accumulates in the model's dtype unless told otherwise (runtime/engine.py, get_data_types)."""
    steps = config.number("gradient_accumulation_steps") or 1
    if config.on("bf16.enabled") and steps >= 8 and not config.has("data_types.grad_accum_dtype") and config.stage:
        yield config.finding(
            "bf16-accumulation",
            "warning",
            "gradient_accumulation_steps",
            f"gradients of {steps:g} micro batches are added up in bf16, whose 8 bits lose the share of the later ones",
            'add "data_types": {"grad_accum_dtype": "fp32"}, at 2 bytes more per parameter of the shard',
            setting("data_types.grad_accum_dtype", "fp32"),
        )


@check(
    "deepspeed",
    Rule("removed-optimizer", "ds", "1-bit optimizers", "gone from DeepSpeed"),
    Rule(
        "gpu-optimizer-offloaded", "ds", "offload with an optimizer that has no CPU form", "refused at the first step"
    ),
)
def optimizer_type(config: Config) -> Iterator[Finding]:
    """Optimizers that are gone, or that offload cannot step on a CPU."""
    name = config.get("optimizer.type")
    if not isinstance(name, str):
        return
    plain = name.lower().replace("-", "").replace("_", "")
    if plain in REMOVED_OPTIMIZERS:
        yield config.finding(
            "removed-optimizer",
            "error",
            "optimizer.type",
            f"{name} is gone from DeepSpeed",
            "use AdamW; slow links gain from ZeRO++ (zero_quantized_gradients at stage 3)",
            setting("optimizer.type", "AdamW"),
        )
    offload = config.get("zero_optimization.offload_optimizer.device", "none")
    if plain in GPU_ONLY_OPTIMIZERS and offload in ("cpu", "nvme"):
        yield config.finding(
            "gpu-optimizer-offloaded",
            "error",
            "optimizer.type",
            f"{name} steps on a GPU only, and its state is offloaded to {offload}",
            "use AdamW, for which DeepSpeed takes its CPU Adam",
            setting("optimizer.type", "AdamW"),
        )


@check("deepspeed", Rule("untested-optimizer", "ds", "an optimizer that ZeRO was not tested with", "refused"))
def untested_optimizer(config: Config) -> Iterator[Finding]:
    """runtime/engine.py, _do_optimizer_sanity_check asserts it."""
    name = config.get("optimizer.type")
    if not isinstance(name, str) or not config.stage or config.on("zero_allow_untested_optimizer"):
        return
    plain = name.lower()
    if plain not in ZERO_OPTIMIZERS and plain.replace("-", "").replace("_", "") not in REMOVED_OPTIMIZERS:
        yield config.finding(
            "untested-optimizer",
            "error",
            "optimizer.type",
            f"ZeRO refuses {name}, which it was not tested with",
            'use AdamW, or add "zero_allow_untested_optimizer": true',
            setting("zero_allow_untested_optimizer", True),
        )


@check("deepspeed", Rule("adam-is-adamw", "ds", "`Adam` with weight decay", "DeepSpeed's Adam decays as AdamW does"))
def adam_is_adamw(config: Config) -> Iterator[Finding]:
    """runtime/engine.py: ADAM_W_MODE_DEFAULT is true."""
    decay = config.get("optimizer.params.weight_decay", 0)
    if config.get("optimizer.type") == "Adam" and decay and not config.has("optimizer.params.adam_w_mode"):
        yield config.finding(
            "adam-is-adamw",
            "note",
            "optimizer.type",
            "DeepSpeed's Adam decays weights as AdamW does unless adam_w_mode is false",
            "write AdamW, which says what runs",
            setting("optimizer.type", "AdamW"),
        )


@check("deepspeed", Rule("clipping-in-optimizer", "ds", "`max_grad_norm` in the optimizer", "refused"))
def clipping_in_optimizer(config: Config) -> Iterator[Finding]:
    """runtime/engine.py, _configure_basic_optimizer raises."""
    if config.has("optimizer.params.max_grad_norm"):
        norm = config.get("optimizer.params.max_grad_norm")
        changes: tuple[Any, ...] = removal("optimizer.params.max_grad_norm")
        if not config.has("gradient_clipping"):
            changes = (*changes, *setting("gradient_clipping", norm))
        yield config.finding(
            "clipping-in-optimizer",
            "error",
            "optimizer.params.max_grad_norm",
            "DeepSpeed refuses it as an optimizer's parameter",
            f"write gradient_clipping: {norm}",
            changes,
        )


@check(
    "deepspeed",
    Rule(
        "client-optimizer-offloaded",
        "ds",
        "offload and no optimizer section",
        "a torch optimizer of the script's own is refused",
    ),
)
def client_optimizer_offloaded(config: Config) -> Iterator[Finding]:
    """runtime/engine.py refuses a torch optimizer under offload unless zero_force_ds_cpu_optimizer is false.

    accelerate, and the Trainer through it, put DeepSpeedCPUAdam in its place (accelerator.py, _prepare_deepspeed)."""
    if config.reader != "deepspeed":
        return
    offload = config.get("zero_optimization.offload_optimizer.device", "none")
    forced = config.get("zero_force_ds_cpu_optimizer", True)
    if offload in ("cpu", "nvme") and not config.has("optimizer") and forced is not False:
        yield config.finding(
            "client-optimizer-offloaded",
            "note",
            "zero_optimization.offload_optimizer",
            "no optimizer section: offload refuses an optimizer that the script makes, unless it is DeepSpeedCPUAdam",
            "add an optimizer section, or zero_force_ds_cpu_optimizer: false for a torch optimizer on the CPU",
        )


@check("deepspeed", Rule("scheduler-name", "ds", "a misspelt scheduler", "fails at start"))
def scheduler_type(config: Config) -> Iterator[Finding]:
    """An unknown name is looked up in torch.optim.lr_scheduler, and fails at start."""
    name = config.get("scheduler.type")
    if isinstance(name, str) and name not in SCHEDULERS and name.lower() in [known.lower() for known in SCHEDULERS]:
        right = next(known for known in SCHEDULERS if known.lower() == name.lower())
        yield config.finding(
            "scheduler-name",
            "error",
            "scheduler.type",
            f"{name} is no scheduler",
            f"write {right}",
            setting("scheduler.type", right),
        )
