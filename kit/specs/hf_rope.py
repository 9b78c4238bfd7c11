"""RoPE keys in ``config.json``, older and newer: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.errors import SpecError
from kit.specs.families import FAMILIES
from kit.specs.hf_keys import Keys
from kit.specs.model import ModelSpec
from kit.specs.text import shown
from kit.specs.validation import thawed

_LAYERS = ("full_attention", "sliding_attention")
"""Gemma 3 has RoPE parameters for each kind of layer (configuration_gemma3.py, convert_rope_params_to_dict)."""

_NUMBERS = (
    "factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_",
    "mscale", "original_max_position_embeddings",
)  # fmt: skip
"""Prefixes of scaling keys whose values are numbers or lists of numbers."""


def read_rope(config: Mapping[str, Any], name: str, keys: Keys) -> dict[str, Any]:
    """Fields of ModelSpec: RoPE base, scaling, rotated part of a head. Raises SpecError if the scaling is not a
    mapping."""
    parameters = _mapping(config.get("rope_parameters") or config.get("rope_scaling") or {}, name)
    local: dict[str, Any] = {}
    traits = FAMILIES[config["model_type"]]
    if "local_rope_theta" in (*traits.takes, *traits.needs):
        inner = _mapping(parameters.get(_LAYERS[1], {}), name)
        own = 10000.0 if config["model_type"] == "gemma3_text" else config.get("rope_theta") or keys.rope_theta
        base = inner.get("rope_theta") or config.get("rope_local_base_freq") or own
        local = {"local_rope_theta": _number(base, name)}
        parameters = _mapping(parameters.get(_LAYERS[0], {} if _LAYERS[1] in parameters else parameters), name)
    scaling = dict(parameters)
    theta = scaling.pop("rope_theta", None) or config.get(keys.rope_names.get("rope_theta", "rope_theta"))
    rotated = scaling.pop("partial_rotary_factor", None)
    if rotated is None:
        rotated = config.get(keys.rope_names.get("partial_rotary_factor", "partial_rotary_factor"))
    kind = scaling.pop("type", None) or "default"  # the key's name before transformers 4.43
    kind = scaling.pop("rope_type", kind)
    if not isinstance(kind, str):
        raise SpecError(f"rope_type={shown(kind)} of {name} is no name of a scaling; give one, or leave it out")
    if config["model_type"] == "phi3" and kind in ("su", "yarn"):  # its older names (configuration_phi3.py)
        kind = "longrope"
    if kind == "longrope" and config.get("original_max_position_embeddings"):
        scaling.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    for key, value in scaling.items():
        if value is not None and key.startswith(_NUMBERS) and not isinstance(value, Mapping):
            for each in value if isinstance(value, list | tuple) else (value,):
                _number(each, name)
    return {
        "rope_theta": _number(theta or keys.rope_theta, name),
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **scaling},
        "partial_rotary_factor": _number(keys.partial_rotary_factor if rotated is None else rotated, name),
        **local,
    }


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"rope_scaling={shown(value)} of {name} is not a mapping of keys; give one, or leave it out")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"a rotary base or factor of {name} is {shown(value)}, which is no number; give one")
    return float(value)


def rope_parameters(model: ModelSpec, keys: Keys) -> dict[str, Any]:
    """``rope_parameters`` for transformers 5 (modeling_rope_utils.py). Raises SpecError for a family with RoPE but
    without a base."""
    if model.rope_theta is None:
        raise SpecError(f"rope_theta=null for {model.name}: family {model.family} rotates its positions; give the base")
    parameters = {"rope_type": "default", **thawed(model.rope_scaling or {}), "rope_theta": model.rope_theta}
    if model.local_rope_theta is not None:
        return {_LAYERS[0]: parameters, _LAYERS[1]: {"rope_type": "default", "rope_theta": model.local_rope_theta}}
    if model.partial_rotary_factor != 1 or keys.partial_rotary_factor != 1:
        parameters["partial_rotary_factor"] = model.partial_rotary_factor
    return parameters
