"""Every rule, in the order of their messages. A rule's id is in its findings; docs/lint.md lists them."""

from __future__ import annotations

from kit.diagnose.lint import (
    accelerate_rules,
    batch_rules,
    consequence_rules,
    key_rules,
    precision_rules,
    zero_rules,
)
from kit.diagnose.lint.config import Check

DEEPSPEED_RULES: tuple[Check, ...] = (
    key_rules.json_syntax,
    key_rules.unknown_key,
    key_rules.removed_key,
    key_rules.deprecated_key,
    key_rules.text_value,
    batch_rules.batch_missing,
    batch_rules.batch_not_positive,
    batch_rules.batch_arithmetic,
    precision_rules.two_precisions,
    precision_rules.bf16_hardware,
    precision_rules.static_loss_scale,
    precision_rules.bf16_accumulation,
    precision_rules.optimizer_type,
    precision_rules.untested_optimizer,
    precision_rules.adam_is_adamw,
    precision_rules.clipping_in_optimizer,
    precision_rules.client_optimizer_offloaded,
    precision_rules.scheduler_type,
    zero_rules.stage_range,
    zero_rules.keys_of_another_stage,
    zero_rules.offload_of_another_stage,
    zero_rules.nvme_path,
    zero_rules.gather_on_save,
    zero_rules.pipeline_with_gradients_partitioned,
    zero_rules.activation_checkpointing_unused,
    zero_rules.auto_unfilled,
    consequence_rules.bucket_memory,
    consequence_rules.memory,
    consequence_rules.speed,
)
"""For ``ds_config.json``."""

ACCELERATE_RULES: tuple[Check, ...] = (
    accelerate_rules.accelerate_unknown_key,
    accelerate_rules.distributed_type,
    accelerate_rules.machines,
    accelerate_rules.decided_by_file,
    accelerate_rules.inline_zero,
    accelerate_rules.fsdp_versions,
)
"""For accelerate's YAML."""
