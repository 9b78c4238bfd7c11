"""transformers' own plans of how ranks split a model: which layers and parameters, and in which style.

A plan is part of a model's configuration (``base_model_tp_plan``, ``base_model_ep_plan``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from transformers import PreTrainedModel

from kit.errors import EngineError


def styles_of(
    model: PreTrainedModel, option: str, size: int, known: Collection[str], names: Iterable[str], instead: str
) -> Mapping[str, str]:
    """Name of a module or parameter → its style, of those ``names`` that are in the plan of ``option`` (``tp`` or
    ``ep``), in their order.

    Raises EngineError, with ``option=size`` and what to use ``instead``, if transformers has no plan for the model, or
    one with other styles than ``known``.
    """
    patterns: dict[str, str] = getattr(model.config, f"base_model_{option}_plan", None) or {}
    unknown = sorted(set(patterns.values()) - set(known))
    if not patterns or unknown:
        raise EngineError(
            f"{option}={size} on engine=torch: transformers' plan for {type(model).__name__} "
            + (f"has {', '.join(unknown)}, which kit does not support" if unknown else "is empty")
            + f"; use {instead}, or {option}=1"
        )
    styles = {
        re.compile(re.escape(f"{model.base_model_prefix}.{pattern}").replace(r"\*", r"\d+")): style
        for pattern, style in patterns.items()
    }
    return {name: style for name in names for pattern, style in styles.items() if pattern.fullmatch(name)}
