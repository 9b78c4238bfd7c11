"""Hugging Face ``config.json`` ↔ ModelSpec. Features that a ModelSpec cannot express are refused, never dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.errors import SpecError
from kit.specs import hf_family_rules, hub, strict_yaml
from kit.specs.families import FAMILIES, Family
from kit.specs.hf_floats import tagged
from kit.specs.hf_keys import KEYS, SPELLINGS, Keys
from kit.specs.hf_rope import read_rope, rope_parameters
from kit.specs.model import ModelSpec
from kit.specs.text import check_line, listed, shown
from kit.specs.text_files import parse_json, read_text, reason
from kit.specs.validation import thawed

_MOST_BYTES = 1 << 23
"""Largest config.json that is read. The longest known one has 300 kB, because classifiers list their labels."""
_MODEL_TYPES: tuple[str, ...] = tuple(FAMILIES)
"""Supported ``model_type`` values: the families of ``ModelSpec``."""
TEXT_PARTS: Mapping[str, Family] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), "qwen3"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), "qwen3_moe"),
}
"""``model_type`` of a text part, or of a whole model whose file does not set them apart → the family it is."""
_ALSO: Mapping[str, Family] = {"kimi_k2": "deepseek_v3"}
"""Other ``model_type`` → family. Kimi K2, for example, is DeepseekV3ForCausalLM."""


def model_of_hub(name: str) -> ModelSpec:
    """The shape of the model of hub id ``name``, from the cache of this disk or fetched. Raises ``SpecError``."""
    file = hub.config_file(name, _MOST_BYTES)
    return read_config(file.parent, name.rpartition("/")[2], f"config.json of {name} at {file.parent.name}")


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of the text part of a model of text and images; None of another model.

    A text part with multimodal RoPE is that of its family here, because kit's data has no images: all three positions
    of a token are then equal (modeling_qwen2_5_vl.py and modeling_qwen3_vl.py, apply_multimodal_rotary_pos_emb).
    """
    inner = config.get("text_config", config if config.get("model_type") in TEXT_PARTS else None)
    if not isinstance(inner, dict):
        return None
    text = inner | {key: config[key] for key in ("tie_word_embeddings",) if key in config}  # the whole class ties
    kind = str(text.get("model_type", config.get("model_type")))
    if kind in TEXT_PARTS:
        text |= {"model_type": TEXT_PARTS[kind], "norm_topk_prob": True}  # as Qwen3VLMoeTextTopKRouter does always
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := text.get(key), dict):
                rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}
                text[key] = {name: "default" if value == "mrope" else value for name, value in rope.items()}
    return text


def read_config(directory: Path, name: str | None = None, source: str = "config.json") -> ModelSpec:
    """The shape of the model in ``directory``. ``name``: of the model; None: the directory's. Raises ``SpecError``."""
    file = directory / "config.json"
    try:
        config = parse_json(read_text(file, _MOST_BYTES), tagged)
    except (FileNotFoundError, NotADirectoryError):
        raise SpecError(f"{directory} has no config.json; give the directory of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{shown(file, str)} cannot be read as JSON: {reason(error)}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{file} holds a {type(config).__name__} where an object of keys is expected")
    return model_from_config(config, name=name or directory.resolve().name, source=source)


def model_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """Keys of a ``config.json`` → ModelSpec. Raises ``SpecError`` for features that kit does not support."""
    check_line("name of the model's directory", name)
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise SpecError(_unsupported(config, name))
    if kind in _ALSO:
        kind = _ALSO[kind]
        config = {**config, "model_type": kind}
    if kind not in _MODEL_TYPES:
        return _of_another_type(config, name, source)
    data = _all_fields(config, name) | {"family": kind, "name": name, "source": source}
    model = strict_yaml.parse(ModelSpec, data, strict_yaml.Document(name=f"config.json of {name}", data={}, lines={}))
    _check_layers(config, model)
    return model


def _of_another_type(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """A model type that no family describes: its text part if a family describes that, or else an approximation."""
    from kit.specs.approximate import approximated  # these ask transformers; most plans are of a known family
    from kit.specs.counting import counted

    answer = counted(config, name)
    # transformers fills in what the file leaves to the defaults of a class.
    text = text_part(config if answer is None else {"text_config": answer.get("sizes")})
    if text is not None and text.get("model_type") in _MODEL_TYPES:
        return model_from_config(text, name, f"{source}, text part of {shown(config['model_type'], str)}")
    return approximated(config, answer, name, source)


def _all_fields(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fields of ModelSpec, without family, name and source."""
    family: Family = config["model_type"]
    keys = KEYS[family]
    config = _with_todays_names(config, keys)
    _refuse(config, name, keys)
    data = _fields(config, name, keys)
    data |= _activation(config, name, keys)
    if FAMILIES[family].positions == "rope":
        data |= read_rope(config, name, keys)
    else:
        data["rope_theta"] = None
    data |= _windows(config, name, keys)
    if family in hf_family_rules.READ:
        data |= hf_family_rules.READ[family](config, data, name)
    return data


def config_from_model(model: ModelSpec) -> dict[str, Any]:
    """ModelSpec → the keys of a ``config.json`` as transformers 5 writes it, ``model_type`` among them.

    Raises SpecError if the family's configuration cannot express the shape. Dropout is off.
    """
    if model.approximate is not None:
        return thawed(model.approximate.config)
    keys = KEYS[model.family]
    config: dict[str, Any] = {"model_type": model.family, **keys.writes}
    for name, key in keys.names.items():
        owner, _, inner = name.rpartition(".")
        config[key] = getattr(getattr(model, owner) if owner else model, inner)
    _check_unsaid(model, keys)
    if keys.activation:
        # GPT-2 uses the older name of gelu_tanh, other families today's.
        config[keys.activation] = "gelu_new" if model.family == "gpt2" else SPELLINGS[model.traits.activation][0]
    if model.traits.positions == "rope":
        config["rope_parameters"] = rope_parameters(model, keys)
    if "full_attention_every" in FAMILIES[model.family].takes:
        config["layer_types"] = _layer_types(model)
    if model.family in hf_family_rules.WRITE:
        config |= hf_family_rules.WRITE[model.family](model)
    return config


def _unsupported(config: Mapping[str, Any], name: str) -> str:
    needed = [
        item.name
        for item in dataclasses.fields(ModelSpec)
        if item.default is dataclasses.MISSING or getattr(item.default, "is_required", lambda: False)()
    ]
    return (
        f"model_type={shown(config.get('model_type'))} of {name} is no name of a kind of model; supported are "
        f"{listed(_MODEL_TYPES)}; a shape of your own needs {listed(needed)}, with the nearest family (llama "
        "where none is)"
    )


def _with_todays_names(config: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    renamed = dict(config)
    for key, others in keys.also.items():
        for other in others:
            if renamed.get(key) is None and other in renamed:
                renamed[key] = renamed[other]
    return renamed


def _refuse(config: Mapping[str, Any], name: str, keys: Keys) -> None:
    """Refuses keys with another than their only supported value."""
    for key, value in keys.only.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if key in config and config[key] not in allowed:
            one = " or ".join(repr(each) for each in allowed if each is not None)
            raise SpecError(f"{key}={shown(config[key])} of {name} is not computed here; only {key}={one} is")


def _fields(config: Mapping[str, Any], name: str, keys: Keys) -> dict[str, Any]:
    """Fields of the table; missing heads and widths are derived from other fields."""
    data: dict[str, Any] = {}
    for field, key in keys.names.items():
        value = config.get(key)
        # Of these, null means none.
        said = key in config and field in ("sliding_window", "attention_softcap", "logit_softcap")
        if value is None and not said:
            if field not in (*keys.defaults, "head_dim", "num_key_value_heads", "ffn_hidden_size"):
                raise SpecError(f"config.json of {name} lacks {key}")
            value = keys.defaults.get(field)
        owner, _, inner = field.rpartition(".")
        (data.setdefault(owner, {}) if owner else data)[inner] = value
    hidden, heads = data["hidden_size"], data["num_attention_heads"]
    data["num_key_value_heads"] = data.get("num_key_value_heads") or heads
    if data.get("head_dim") is None and "latent" not in data:
        data["head_dim"] = _head_dim(hidden, heads, name)
    if data.get("ffn_hidden_size") is None:
        if keys.mlp_ratio is None:
            raise SpecError(f"config.json of {name} lacks {keys.names['ffn_hidden_size']}")
        data["ffn_hidden_size"] = keys.mlp_ratio * hidden if isinstance(hidden, int) else hidden
    if "num_experts" in data and "moe_ffn_hidden_size" not in data:
        data["moe_ffn_hidden_size"] = data["ffn_hidden_size"]
    return data


def _activation(config: Mapping[str, Any], name: str, keys: Keys) -> dict[str, Any]:
    """The activation, if it is not the family's default; refuses unknown activations."""
    if keys.activation is None or config.get(keys.activation) is None:
        return {}
    traits, given = FAMILIES[config["model_type"]], config[keys.activation]
    if not isinstance(given, str):
        raise SpecError(f"{keys.activation}={shown(given)} of {name} is no name of an activation; give one")
    known = (traits.activation, *traits.choices.get("activation", ()))
    if keys.spellings.get(given) == traits.activation or given in SPELLINGS[traits.activation]:
        return {}
    for activation in known:
        if given in SPELLINGS[activation]:  # type: ignore[index]  # choices of the table
            return {"activation": activation}
    first = SPELLINGS[traits.activation][0]
    raise SpecError(
        f"{keys.activation}={shown(given)} of {name} is not computed here; only {keys.activation}={first!r} is"
    )


def _windows(config: Mapping[str, Any], name: str, keys: Keys) -> dict[str, Any]:
    """Finds the layers with a sliding window, in the list of layers or by the family's pattern."""
    layers = config.get("layer_types")
    if layers is not None and not (isinstance(layers, list) and all(isinstance(kind, str) for kind in layers)):
        raise SpecError(f"layer_types={shown(layers)} of {name} is no list, of one kind a layer; give one")
    if not keys.full_attention_every:
        return {}
    if layers:
        return {"full_attention_every": layers.index("full_attention") + 1 if "full_attention" in layers else 0}
    return {"full_attention_every": config.get("sliding_window_pattern") or keys.full_attention_every}


def _layer_types(model: ModelSpec) -> list[str]:
    return ["full_attention" if model.window(i) is None else "sliding_attention" for i in range(model.num_layers)]


def _check_layers(config: Mapping[str, Any], model: ModelSpec) -> None:
    """Checks that the file's list of layers, if present, agrees with the spec."""
    layers, window = config.get("layer_types"), config.get("sliding_window")
    dropped = window is not None and model.sliding_window is None and config.get("use_sliding_window")
    differs = dropped if layers is None else layers != _layer_types(model)
    if differs:
        raise SpecError(
            f"sliding_window={shown(window)} of {model.name}: {model.family} has it in layers that do not follow the "
            "pattern known here; use a model with use_sliding_window=false, or with the family's own layer_types"
        )


def _check_unsaid(model: ModelSpec, keys: Keys) -> None:
    """Checks fields without a key in the family's configuration: they must have the value that its class uses."""
    fixed: dict[str, Any] = {}
    if "norm_eps" not in keys.names:
        fixed["norm_eps"] = 1e-5
    if "ffn_hidden_size" not in keys.names and keys.mlp_ratio:
        fixed["ffn_hidden_size"] = keys.mlp_ratio * model.hidden_size
    if model.num_experts and "moe_ffn_hidden_size" not in keys.names:
        fixed["moe_ffn_hidden_size"] = model.ffn_hidden_size
    for name, value in fixed.items():
        if getattr(model, name) != value:
            raise SpecError(
                f"{name}={getattr(model, name)} of {model.name}: family {model.family} has no choice of it; use {value}"
            )


def _head_dim(hidden: Any, heads: Any, name: str) -> int:
    if not (isinstance(hidden, int) and isinstance(heads, int)) or heads < 1 or hidden % heads:
        raise SpecError(
            f"config.json of {name}: {shown(heads)} attention heads do not divide the hidden size {shown(hidden)}"
        )
    return hidden // heads
