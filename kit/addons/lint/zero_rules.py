"""Rules of ZeRO: keys that a stage does not read, offload, and settings that fail at the end of a run."""

from __future__ import annotations

from pathlib import Path

from kit.addons.lint.config import AUTO, Config, removal, setting
from kit.addons.lint.rule import Case, Each, Rule, table
from kit.specs.extra import flat

STAGE_3_ONLY = ("sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
"""Stage-3 keys that do not begin with stage3_."""
BELOW_STAGE_3_ONLY = ("allgather_bucket_size", "allgather_partitions", "round_robin_gradients")
"""Keys that only stage_1_and_2.py reads."""
HARMLESS_DEFAULTS = {"zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_gradients": False}


def _no_stage(config: Config) -> bool:
    stage = config.get("zero_optimization.stage")
    return not isinstance(stage, str | None) and not (isinstance(stage, int) and 0 <= stage <= 3)


def _has_no_effect(config: Config, key: str) -> bool:
    """DeepSpeed accepts keys of another stage and ignores them. sub_group_size below 3 is too common to report it."""
    if config.stage is None or (key == "sub_group_size" and config.stage in (1, 2)):
        return False
    if key in HARMLESS_DEFAULTS and config.section("zero_optimization")[key] == HARMLESS_DEFAULTS[key]:
        return False
    return key in BELOW_STAGE_3_ONLY if config.stage == 3 else key.startswith("stage3_") or key in STAGE_3_ONLY


def _nvme_path(config: Config, name: str) -> str:
    path = config.get(f"zero_optimization.offload_{name}.nvme_path")
    return path if isinstance(path, str) else ""


def _on_nvme(config: Config) -> list[str]:
    """What is offloaded there. swap_tensor/partitioned_param_swapper.py joins the path at start."""
    return [name for name in ("optimizer", "param") if config.offloaded(name) == "nvme"]


_AIO = {
    "block_size": 1048576,
    "queue_depth": 32,
    "intra_op_parallelism": 4,
    "single_submit": False,
    "overlap_events": True,
}
_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
_GATHER_TOO = (
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "zero_optimization.gather_16bit_weights_on_model_save",
)
"""Other names that DeepSpeed accepts for this key."""

FILLED_BY_ACCELERATE = (
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)
"""Keys that accelerate fills from its YAML or environment, also in a Trainer's run (accelerate/utils/dataclasses.py,
DeepSpeedPlugin)."""
FILLED_BY_TRAINER = (
    *FILLED_BY_ACCELERATE,
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
"""Keys that the Trainer fills (transformers/integrations/deepspeed.py, trainer_config_process and
trainer_config_finalize)."""


DEFAULT_FOR_AUTO = ("zero_optimization.", "fp16.", "bf16.")
"""Sections in which "auto" means DeepSpeed's own default (runtime/config_utils.py, DeepSpeedConfigModel)."""


def _autos(config: Config) -> list[str]:
    return [dotted for dotted, value in flat(config.document.data).items() if value == AUTO]


def _filled(config: Config) -> list[str]:
    """What the Hugging Face integrations fill."""
    return [dotted for dotted in _autos(config) if dotted in FILLED_BY_TRAINER]


table(
    "deepspeed",
    {
        Rule("zero-stage", "ds", "a stage that does not exist", "refused"): (
            Case(
                "error",
                "zero_optimization.stage",
                _no_stage,
                lambda c: f"{c.get('zero_optimization.stage')} is no stage",
                "use 0, 1, 2 or 3",
            ),
        ),
        Rule("zenflow-weights", "ds", "ZenFlow, which permutes the weights", "trains from wrong weights"): (
            Case(
                "error",
                "zero_optimization.zenflow",
                lambda c: bool(c.get("zero_optimization.zenflow")),
                "DeepSpeed 0.19.8 flattens matrices transposed and reads them back in another order: at stages 1 and 2 "
                "every weight is in the wrong place before the first step",
                "remove the section; offload_optimizer alone keeps the weights",
            ),
        ),
        Rule("other-stage-key", "ds, accelerate", "keys of another stage", "accepted and ignored"): (
            Each(
                "warning",
                lambda c, key: f"zero_optimization.{key}",
                lambda c: [key for key in c.section("zero_optimization") if _has_no_effect(c, key)],
                lambda c, key: (
                    f"read by {'stages 1 and 2 only' if c.stage == 3 else 'stage 3 only'}; at stage {c.stage} it has "
                    "no effect"
                ),
                "remove it, or change the stage",
                lambda c, key: removal(f"zero_optimization.{key}"),
            ),
        ),
        # Parameters are offloaded at stage 3 (stage3.py), optimizer state from stage 1 on, to NVMe at stage 3.
        Rule(
            "offload-stage",
            "ds, accelerate",
            "parameters offloaded below stage 3, state on NVMe below stage 3",
            "they stay on the GPU, or in host memory",
        ): (
            Case(
                "error",
                "zero_optimization.offload_param",
                lambda c: c.offloaded("param") and c.stage not in (None, 3),
                lambda c: f"only stage 3 partitions parameters, so that at stage {c.stage} they stay on the GPU",
                "use stage 3, or remove it",
                removal("zero_optimization.offload_param"),
            ),
            Case(
                "error",
                "zero_optimization.offload_optimizer",
                lambda c: c.offloaded("optimizer") and c.stage == 0,
                "only the ZeRO optimizers offload, and stage 0 has none",
                "use stage 1, 2 or 3, or remove it",
                removal("zero_optimization.offload_optimizer"),
            ),
            Case(
                "error",
                "zero_optimization.offload_optimizer.device",
                lambda c: c.offloaded("optimizer") == "nvme" and c.stage in (1, 2),
                lambda c: f"at stage {c.stage} DeepSpeed takes nvme for cpu: the state stays in host memory",
                "use stage 3, or write cpu",
                setting("zero_optimization.offload_optimizer.device", "cpu"),
            ),
        ),
        Rule(
            "nvme-path",
            "ds, accelerate",
            "NVMe without a path, or a path that is not a directory here",
            "fails at start",
        ): (
            Each(
                "error",
                lambda c, name: f"zero_optimization.offload_{name}",
                lambda c: [name for name in _on_nvme(c) if not _nvme_path(c, name)],
                "device nvme without nvme_path",
                "add nvme_path, a directory on every node's own disk",
            ),
            Each(
                "note",
                lambda c, name: f"zero_optimization.offload_{name}.nvme_path",
                lambda c: [name for name in _on_nvme(c) if (path := _nvme_path(c, name)) and not Path(path).is_dir()],
                lambda c, name: f"{_nvme_path(c, name)} is not a directory on this machine",
                "make sure that every node has it",
            ),
        ),
        Rule("nvme-aio", "ds", "NVMe without an aio section", "reads go one at a time, far below a drive's speed"): (
            Each(
                "warning",
                lambda c, name: f"zero_optimization.offload_{name}",
                lambda c: [] if c.has("aio") else _on_nvme(c),
                "without an aio section reads go one at a time (queue depth 8, one thread), far below a drive's speed",
                "add aio: block_size 1048576, queue_depth 32, intra_op_parallelism 4",
                setting("aio", _AIO),
            ),
        ),
        # runtime/engine.py, save_16bit_model: without it a stage-3 model is saved as empty tensors.
        Rule(
            "gather-on-save",
            "ds, accelerate",
            "stage 3 without gathered weights on save",
            "the saved model is missing or empty",
        ): (
            Case(
                "warning",
                lambda c: _GATHER if c.has(_GATHER) else "zero_optimization.stage",
                lambda c: c.stage == 3 and c.get(_GATHER) != AUTO and not any(map(c.on, (_GATHER, *_GATHER_TOO))),
                "a model saved at stage 3 holds empty tensors: its weights are not gathered",
                'add "stage3_gather_16bit_weights_on_model_save": true',
                setting(_GATHER, True),
            ),
        ),
        # runtime/pipe/engine.py: PipelineEngine, which deepspeed.initialize makes for a PipelineModule alone, asserts a
        # stage below 2. Any other model never looks at the section.
        Rule("pipeline-zero", "ds", "a pipeline section at ZeRO 2 or 3", "refused for a PipelineModule, else unread"): (
            Case(
                "note",
                "pipeline",
                lambda c: (c.stage or 0) >= 2 and c.section("pipeline"),
                lambda c: f"read for a PipelineModule alone, which refuses ZeRO stage {c.stage}",
                "remove it, or use stage 1 with a PipelineModule",
            ),
        ),
        # Only deepspeed.checkpointing.checkpoint reads it.
        Rule("checkpointing-unused", "ds", "`activation_checkpointing` for a Hugging Face model", "nothing reads it"): (
            Case(
                "note",
                "activation_checkpointing",
                lambda c: c.section("activation_checkpointing"),
                "read by deepspeed.checkpointing alone, which Hugging Face models do not call",
                "turn gradient checkpointing on in the model or the Trainer",
            ),
        ),
        Rule(
            "auto-unfilled",
            "ds",
            '`"auto"` where no reader fills it in',
            "text where a number should be; in some sections DeepSpeed's default",
        ): (
            Each(
                lambda c, dotted: "note" if dotted.startswith(DEFAULT_FOR_AUTO) else "error",
                lambda c, dotted: dotted,
                lambda c: [dotted for dotted in _autos(c) if dotted not in FILLED_BY_TRAINER],
                lambda c, dotted: (
                    '"auto" here is filled in by nobody, the Trainer included'
                    + ("; DeepSpeed's default stands" if dotted.startswith(DEFAULT_FOR_AUTO) else "")
                ),
                "write a value, or leave the key out",
                lambda c, dotted: removal(dotted),
            ),
        ),
        Rule(
            "auto-outside-trainer",
            "ds",
            '`"auto"` outside of the Hugging Face Trainer',
            "only the Trainer fills it in",
        ): (
            Each(
                lambda c, dotted: "warning" if dotted.startswith(DEFAULT_FOR_AUTO) else "error",
                lambda c, dotted: dotted,
                lambda c: _filled(c) if c.reader == "deepspeed" else (),
                lambda c, dotted: (
                    '"auto" is filled in by the Hugging Face Trainer and by accelerate; deepspeed.initialize '
                    + ("takes its own default" if dotted.startswith(DEFAULT_FOR_AUTO) else "does not")
                ),
                "write a value",
            ),
            Case(
                "note",
                lambda c: _filled(c)[0],
                lambda c: c.reader is None and _filled(c),
                lambda c: (
                    f'{len(_filled(c))} values are "auto": filled in by the Hugging Face Trainer, and by accelerate in '
                    "part"
                ),
                "write values where deepspeed.initialize reads the file",
            ),
        ),
    },
)
