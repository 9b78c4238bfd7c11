"""Rules of accelerate's FSDP: keys of version 1 under version 2, and what is gathered at once."""

from __future__ import annotations

from kit.addons.lint.config import removal, setting
from kit.addons.lint.described import one_fsdp_unit, wrap_policy
from kit.addons.lint.rule import Case, Each, Rule, table

POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
"""accelerate/utils/constants.py, FSDP_AUTO_WRAP_POLICY."""
_POLICY = "fsdp_config.fsdp_auto_wrap_policy"


_OF_FSDP1 = ("fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_sharding_strategy", "fsdp_backward_prefetch")


table(
    "accelerate",
    {
        # accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin: keys that FSDP2 does not have.
        Rule("fsdp2-key", "accelerate", "keys of FSDP1 under version 2", "refused or ignored"): (
            Case(
                "error",
                "fsdp_config.fsdp_forward_prefetch",
                lambda c: c.number("fsdp_config.fsdp_version") == 2 and c.get("fsdp_config.fsdp_forward_prefetch"),
                "refused with fsdp_version 2",
                "remove it",
                removal("fsdp_config.fsdp_forward_prefetch"),
            ),
            Each(
                "warning",
                lambda c, key: f"fsdp_config.{key}",
                lambda c: [
                    key
                    for key in _OF_FSDP1
                    if c.number("fsdp_config.fsdp_version") == 2 and c.has(f"fsdp_config.{key}")
                ],
                "of FSDP1; version 2 has no such choice",
                lambda c, key: "use fsdp_reshard_after_forward" if key == "fsdp_sharding_strategy" else "remove it",
                lambda c, key: removal(f"fsdp_config.{key}"),
            ),
        ),
        # FullyShardedDataParallelPlugin: NO_WRAP unless given; set_auto_wrap_policy drops a size of 0.
        Rule("wrap-policy", "accelerate", "FSDP without a wrap policy", "all weights are gathered at once"): (
            Case(
                "error",
                _POLICY,
                lambda c: c.get("distributed_type") == "FSDP" and wrap_policy(c) not in POLICIES,
                lambda c: f"{wrap_policy(c)[:50]} is no policy: accelerate refuses it",
                f"write {', '.join(POLICIES[:2])} or {POLICIES[2]}",
            ),
            Case(
                "warning",
                _POLICY,
                one_fsdp_unit,
                lambda c: (
                    f"{'SIZE_BASED_WRAP of 0 parameters' if wrap_policy(c) == POLICIES[1] else 'NO_WRAP'} makes the "
                    "model one group: all its weights, then all gradients, are on each GPU at once"
                ),
                "write TRANSFORMER_BASED_WRAP, which gathers a layer at a time",
                setting(_POLICY, "TRANSFORMER_BASED_WRAP"),
            ),
        ),
    },
)
