"""``extra`` of a recipe: keys that kit passes on to an engine as they are, and does not predict."""

from collections.abc import Mapping
from typing import Any

from kit.specs.validation import FrozenMap, TextMapping, spec


@spec
class Extra:
    """Keys for an engine's own file. One that the plan decides is refused (``kit.emit.extra``)."""

    megatron: TextMapping = FrozenMap({})
    """Merged into megatron.yaml: ``transformer_config: {moe_shared_expert_overlap: true}``."""
    deepspeed: TextMapping = FrozenMap({})
    """Merged into ds_config.json: ``zero_optimization: {use_multi_rank_bucket_allreduce: false}``."""

    def __bool__(self) -> bool:
        return bool(self.megatron or self.deepspeed)

    def flat(self) -> dict[str, Any]:
        """Dotted key, from the engine's name → value."""
        return flat({name: section for name, section in vars(self).items() if section})


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over``, section by section."""
    found = dict(base)
    for key, value in over.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return found


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections → dotted keys."""
    keys: dict[str, Any] = {}
    for key, value in config.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return keys
