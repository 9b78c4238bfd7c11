"""A Hugging Face ``config.json`` → a ModelSpec. What the ModelSpec cannot say is refused, never dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.errors import SpecError
from kit.specs import encoder_decoder, yaml
from kit.specs.model import ENCODER_DECODER, WINDOWED, WITH_EXPERTS, ModelSpec

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe", "t5", "bart", "blenderbot")
"""``model_type`` values that are understood: the families of ``ModelSpec``."""


def read_config(directory: Path) -> ModelSpec:
    """The shape of the model in ``directory``. Raises ``SpecError``."""
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{directory} has no config.json; give the directory of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{file} holds a {type(config).__name__} where an object of keys is expected")
    return model_from_config(config, name=directory.resolve().name, source=file.name)


def model_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """Keys as in ``config.json`` → ModelSpec. Raises ``SpecError`` for what kit does not compute."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise SpecError(f"model_type={kind!r} of {name} is not supported; supported are {', '.join(MODEL_TYPES)}")
    if kind in ENCODER_DECODER:
        data = encoder_decoder.fields(config, name)
    else:
        data = _gpt2(config, name) if kind == "gpt2" else _llama_like(config, name)
    data |= {"name": name, "source": source}
    return yaml.parse(ModelSpec, data, yaml.Document(name=f"config.json of {name}", data={}, lines={}))


def _llama_like(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    kind = config["model_type"]
    _refuse(config, name, {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False})
    if config.get("sliding_window") is not None and kind not in WINDOWED and config.get("use_sliding_window"):
        raise SpecError(
            f"sliding_window={config['sliding_window']} of {name}: {kind} has it in some layers only, which is not "
            "computed here; use a model with use_sliding_window=false"
        )
    hidden, heads = _required(config, "hidden_size", name), _required(config, "num_attention_heads", name)
    theta, scaling = _rope(config)
    if kind == "phi3":
        _check_phi3(config, scaling, name)
    experts = _experts(config, name) if kind in WITH_EXPERTS else {}
    return {
        "family": kind,
        **experts,
        "num_layers": _required(config, "num_hidden_layers", name),
        "hidden_size": hidden,
        "ffn_hidden_size": _required(config, "intermediate_size", name),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or _head_dim(hidden, heads, name),
        "vocab_size": _required(config, "vocab_size", name),
        "max_position_embeddings": _required(config, "max_position_embeddings", name),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        # Defaults of the transformers classes where a file leaves a key out.
        "norm_eps": config.get("rms_norm_eps", 1e-5 if kind == "phi3" else 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        # An absent key is Mistral's default of 4096; null is no window (transformers' MistralConfig).
        "sliding_window": config.get("sliding_window", _DEFAULT_WINDOWS.get(kind)) if kind in WINDOWED else None,
    }


_DEFAULT_WINDOWS = {"mistral": 4096}


def _experts(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    if config["model_type"] == "mixtral":
        return {
            "num_experts": config.get("num_local_experts", config.get("num_experts", 8)),
            "experts_per_token": config.get("num_experts_per_tok", 2),
            "moe_ffn_hidden_size": _required(config, "intermediate_size", name),
        }
    dense, every = config.get("mlp_only_layers"), config.get("decoder_sparse_step", 1)
    if dense or every != 1:
        raise SpecError(
            f"mlp_only_layers={dense}, decoder_sparse_step={every} of {name}: layers without experts among others are "
            "not computed here; use a model with experts in all"
        )
    return {
        # transformers 5 writes the second name
        "num_experts": config.get("num_experts", config.get("num_local_experts", 128)),
        "experts_per_token": config.get("num_experts_per_tok", 8),
        "moe_ffn_hidden_size": _required(config, "moe_intermediate_size", name),
        "norm_topk_prob": config.get("norm_topk_prob", False),
    }


def _check_phi3(config: Mapping[str, Any], scaling: dict[str, Any] | None, name: str) -> None:
    partial = (config.get("rope_parameters") or config).get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise SpecError(
            f"partial_rotary_factor={partial} of {name}: only whole heads are rotated here; use another model"
        )
    if scaling is not None:
        raise SpecError(
            f"rope_type={scaling['rope_type']} of {name}: of Phi-3 only unscaled positions are computed here; "
            "use a variant with a short context, such as Phi-3-mini-4k"
        )


def _gpt2(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    _refuse(
        config,
        name,
        {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    )
    hidden, heads = _required(config, "n_embd", name), _required(config, "n_head", name)
    return {
        "family": "gpt2",
        "num_layers": _required(config, "n_layer", name),
        "hidden_size": hidden,
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": _head_dim(hidden, heads, name),
        "vocab_size": _required(config, "vocab_size", name),
        "max_position_embeddings": _required(config, "n_positions", name),
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "rope_theta": None,
    }


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling). transformers 5 writes ``rope_parameters``; before, ``rope_theta`` and ``rope_scaling``."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = parameters.pop("type", None) or "default"  # the key's name before transformers 4.43
    kind = parameters.pop("rope_type", kind)
    if parameters.get("partial_rotary_factor") == 1.0:  # transformers writes the default for some families
        del parameters["partial_rotary_factor"]
    return float(theta), None if kind == "default" else {"rope_type": kind, **parameters}


def _refuse(config: Mapping[str, Any], name: str, only: Mapping[str, Any]) -> None:
    """Keys that, where present, may have one value alone."""
    for key, value in only.items():
        if config.get(key, value) != value:
            raise SpecError(f"{key}={config[key]!r} of {name} is not computed here; only {key}={value!r} is")


def _required(config: Mapping[str, Any], key: str, name: str) -> Any:
    if config.get(key) is None:
        raise SpecError(f"config.json of {name} lacks {key}")
    return config[key]


def _head_dim(hidden: Any, heads: Any, name: str) -> int:
    if not (isinstance(hidden, int) and isinstance(heads, int)) or heads < 1 or hidden % heads:
        raise SpecError(f"config.json of {name}: {heads!r} attention heads do not divide the hidden size {hidden!r}")
    return hidden // heads
