"""Rules of precision, optimizer and scheduler: contradictions, and features that the hardware lacks."""

from __future__ import annotations

from kit.addons.lint.config import Config, removal, setting
from kit.addons.lint.rule import Case, Rule, table

GPU_ONLY_OPTIMIZERS = ("lamb",)
"""DeepSpeed's optimizers without a CPU implementation (runtime/engine.py, _configure_basic_optimizer)."""
ZERO_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion", "muon")
"""Optimizers that ZeRO accepts without zero_allow_untested_optimizer (runtime/zero/utils.py)."""
REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb", "1bitadam", "1bitlamb", "01adam")
"""Compressed optimizers, which DeepSpeed removed together with their communication backends."""
SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""runtime/lr_schedules.py, VALID_LR_SCHEDULES; other names must be those of torch.optim.lr_scheduler."""


def _optimizer(config: Config) -> str:
    """The optimizer's name; empty if there is none."""
    name = config.get("optimizer.type")
    return name if isinstance(name, str) else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _untested(config: Config) -> bool:
    name = _optimizer(config)
    known = name.lower() in ZERO_OPTIMIZERS or _plain(name) in REMOVED_OPTIMIZERS
    return bool(name and config.stage) and not known and not config.on("zero_allow_untested_optimizer")


def _has_bf16(config: Config) -> bool:
    return config.cluster is None or bool(config.cluster.gpu.bf16_tflops)


def _scheduler(config: Config) -> str | None:
    """The correct name of a misspelt scheduler."""
    name = str(config.get("scheduler.type"))
    return next((known for known in SCHEDULERS if known.lower() == name.lower() and known != name), None)


table(
    "deepspeed",
    {
        # runtime/config.py asserts that one of them is off.
        Rule("two-precisions", "ds", "fp16 and bf16 at once", "refused"): (
            Case(
                "error",
                "fp16.enabled",
                lambda c: c.on("fp16.enabled") and c.on("bf16.enabled"),
                "fp16 and bf16 are both on, and DeepSpeed takes one",
                lambda c: f"keep {'bf16' if _has_bf16(c) else 'fp16'}",
                lambda c: setting(f"{'fp16' if _has_bf16(c) else 'bf16'}.enabled", False),
            ),
        ),
        Rule("bf16-hardware", "ds", "bf16 on Turing and older", "emulated, many times slower"): (
            Case(
                "error",
                "bf16.enabled",
                lambda c: c.on("bf16.enabled") and c.cluster and c.cluster.gpu.device == "cuda" and not _has_bf16(c),
                lambda c: f"{c.cluster and c.cluster.gpu.name} has no bf16 units",
                "use fp16 with its loss scaling",
                (*setting("bf16.enabled", False), *setting("fp16.enabled", True)),
            ),
        ),
        # A fixed scale overflows or underflows as training goes on; 0 is DeepSpeed's word for dynamic.
        Rule("static-loss-scale", "ds", "a fixed fp16 scale", "overflows as training goes on"): (
            Case(
                "warning",
                "fp16.loss_scale",
                lambda c: c.on("fp16.enabled") and c.number("fp16.loss_scale"),
                lambda c: (
                    f"a fixed scale of {c.number('fp16.loss_scale'):g}: gradients that outgrow it overflow, step after "
                    "step"
                ),
                "use 0, which scales dynamically",
                setting("fp16.loss_scale", 0),
            ),
        ),
        # DeepSpeed accumulates in the model's dtype unless told otherwise (runtime/engine.py, get_data_types).
        Rule("bf16-accumulation", "ds", "many micro batches added up in bf16", "the later ones are lost to rounding"): (
            Case(
                "warning",
                "gradient_accumulation_steps",
                lambda c: (
                    c.on("bf16.enabled")
                    and (c.number("gradient_accumulation_steps") or 1) >= 8
                    and not c.has("data_types.grad_accum_dtype")
                    and c.stage
                ),
                lambda c: (
                    f"gradients of {c.number('gradient_accumulation_steps'):g} micro batches are added up in bf16, "
                    "whose 8 bits lose the share of the later ones"
                ),
                'add "data_types": {"grad_accum_dtype": "fp32"}, at 2 bytes more per parameter of the shard',
                setting("data_types.grad_accum_dtype", "fp32"),
            ),
        ),
        Rule("bf16-state", "ds", "master weights in bf16, or states without them", "small updates are lost; refused"): (
            Case(
                "warning",
                "bf16.bf16_master_weights_and_grads",
                lambda c: c.on("bf16.bf16_master_weights_and_grads") and c.stage,
                "no fp32 master weights: an update below a 256th of a weight may be rounded away",
                "remove it, at 2 bytes more per parameter of the shard (6 with bf16_optimizer_states)",
                (*removal("bf16.bf16_master_weights_and_grads"), *removal("bf16.bf16_optimizer_states")),
            ),
            # runtime/config.py, _do_error_check asserts both.
            Case(
                "error",
                "bf16.bf16_optimizer_states",
                lambda c: c.on("bf16.bf16_optimizer_states") and not c.on("bf16.bf16_master_weights_and_grads"),
                "DeepSpeed takes it with bf16_master_weights_and_grads alone",
                "add bf16_master_weights_and_grads, or remove both",
                removal("bf16.bf16_optimizer_states"),
            ),
            Case(
                "error",
                "bf16.bf16_master_weights_and_grads",
                lambda c: c.on("bf16.bf16_master_weights_and_grads") and c.stage == 0,
                "DeepSpeed takes it at stages 1, 2 and 3 alone",
                "use stage 1, 2 or 3, or remove it",
                (*removal("bf16.bf16_master_weights_and_grads"), *removal("bf16.bf16_optimizer_states")),
            ),
        ),
        Rule("removed-optimizer", "ds", "1-bit optimizers", "gone from DeepSpeed"): (
            Case(
                "error",
                "optimizer.type",
                lambda c: _plain(_optimizer(c)) in REMOVED_OPTIMIZERS,
                lambda c: f"{_optimizer(c)} is gone from DeepSpeed",
                "use AdamW; slow links gain from ZeRO++ (zero_quantized_gradients at stage 3)",
                setting("optimizer.type", "AdamW"),
            ),
        ),
        Rule(
            "gpu-optimizer-offloaded",
            "ds",
            "offload with an optimizer that has no CPU form",
            "refused at the first step",
        ): (
            Case(
                "error",
                "optimizer.type",
                lambda c: _plain(_optimizer(c)) in GPU_ONLY_OPTIMIZERS and c.offloaded("optimizer"),
                lambda c: (
                    f"{_optimizer(c)} steps on a GPU only, and its state is offloaded to {c.offloaded('optimizer')}"
                ),
                "use AdamW, for which DeepSpeed takes its CPU Adam",
                setting("optimizer.type", "AdamW"),
            ),
        ),
        # runtime/engine.py, _do_optimizer_sanity_check asserts it.
        Rule("untested-optimizer", "ds", "an optimizer that ZeRO was not tested with", "refused"): (
            Case(
                "error",
                "optimizer.type",
                _untested,
                lambda c: f"ZeRO refuses {_optimizer(c)}, which it was not tested with",
                'use AdamW, or add "zero_allow_untested_optimizer": true',
                setting("zero_allow_untested_optimizer", True),
            ),
        ),
        # runtime/engine.py: ADAM_W_MODE_DEFAULT is true.
        Rule("adam-is-adamw", "ds", "`Adam` with weight decay", "DeepSpeed's Adam decays as AdamW does"): (
            Case(
                "note",
                "optimizer.type",
                lambda c: (
                    c.get("optimizer.type") == "Adam"
                    and c.get("optimizer.params.weight_decay", 0)
                    and not c.has("optimizer.params.adam_w_mode")
                ),
                "DeepSpeed's Adam decays weights as AdamW does unless adam_w_mode is false",
                "write AdamW, which says what runs",
                setting("optimizer.type", "AdamW"),
            ),
        ),
        # runtime/engine.py, _configure_basic_optimizer raises.
        Rule("clipping-in-optimizer", "ds", "`max_grad_norm` in the optimizer", "refused"): (
            Case(
                "error",
                "optimizer.params.max_grad_norm",
                lambda c: c.has("optimizer.params.max_grad_norm"),
                "DeepSpeed refuses it as an optimizer's parameter",
                lambda c: f"write gradient_clipping: {c.get('optimizer.params.max_grad_norm')}",
                lambda c: c.moved("optimizer.params.max_grad_norm", "gradient_clipping"),
            ),
        ),
        # runtime/engine.py refuses a torch optimizer under offload unless zero_force_ds_cpu_optimizer is false.
        # accelerate, and the Trainer through it, put DeepSpeedCPUAdam in its place (_prepare_deepspeed).
        Rule(
            "client-optimizer-offloaded",
            "ds",
            "offload and no optimizer section",
            "a torch optimizer of the script's own is refused",
        ): (
            Case(
                "note",
                "zero_optimization.offload_optimizer",
                lambda c: (
                    c.reader == "deepspeed"
                    and c.offloaded("optimizer")
                    and not c.has("optimizer")
                    and c.get("zero_force_ds_cpu_optimizer", True) is not False
                ),
                "no optimizer section: offload refuses an optimizer that the script makes, unless it is "
                "DeepSpeedCPUAdam",
                "add an optimizer section, or zero_force_ds_cpu_optimizer: false for a torch optimizer on the CPU",
            ),
        ),
        # An unknown name is looked up in torch.optim.lr_scheduler, and fails at start.
        Rule("scheduler-name", "ds", "a misspelt scheduler", "fails at start"): (
            Case(
                "error",
                "scheduler.type",
                _scheduler,
                lambda c: f"{c.get('scheduler.type')} is no scheduler",
                lambda c: f"write {_scheduler(c)}",
                lambda c: setting("scheduler.type", _scheduler(c)),
            ),
        ),
    },
)
