"""``python -m kit.engines.huggingface.count_parameters < config.json`` counts a configuration's parameters.

transformers builds the model on torch's meta device, without memory, weights or code from a repository. The output is
a JSON object: the text model's configuration, all its sizes with their defaults, its parameters by kind, the number of
layers with each kind, and traits of its modules. If transformers refuses, the object is ``refused`` with the reason.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kit.specs.hf_floats import decoded, tagged
from kit.specs.huggingface import TEXT_PARTS

_KINDS = (
    ("router", re.compile(r"(Router|Gating)$")),
    ("experts", re.compile(r"(?<!Shared)Experts$")),
    ("mlp", re.compile(r"(MLP|Mlp|FeedForward|FFN|Intermediate|MLPBlock)$")),
    ("recurrent", re.compile(r"(Mixer|DeltaNet|DeltaAttention|LightningAttention|MambaLayer|RecurrentBlock)$")),
    ("recurrent", re.compile(r"(ShortConv|xLSTMLayer|RwkvSelfAttention)$")),
    ("attention", re.compile(r"(Attention|MLA)$")),
)
"""(kind, ending of the class name): gives the kind of a module. The outermost module with a kind
decides; inside an ``mlp`` an inner kind decides."""
_QUERY_NORM = re.compile(r"\.(q|query)_?(layer)?_?norm")
_WIDEST_HEAD = 512
_ONE_PROJECTION = re.compile(r"\.(qkv|qkv_proj|query_key_value|c_attn|Wqkv|in_proj_qkv)\.weight$")


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object (see above) for the content of a ``config.json``."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        return {"refused": "unknown"}
    given = {key: decoded(value) for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    whole = CONFIG_MAPPING[kind].from_dict(given)
    text = whole.get_text_config(decoder=True)
    if text is not whole and hasattr(whole, "tie_word_embeddings"):
        # The class of the whole model ties its head; the text part's own key is not read.
        text.tie_word_embeddings = whole.tie_word_embeddings
    kind = text.model_type
    sizes = text.to_dict() | {key: getattr(text, name, None) for key, name in text.attribute_map.items()}
    if kind in TEXT_PARTS:
        return {"sizes": {**_plain(sizes), "model_type": kind}}
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return {"refused": "no causal language model", "model_type": kind}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    sizes["num_hidden_layers"] = getattr(text, "num_hidden_layers", None)  # some model types derive it from a list
    own = {"model_type": kind, **_plain(text.to_diff_dict())}
    return {"config": own, "sizes": {**_plain(sizes), "model_type": kind}, **_counted(model, _layers(model))}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them."""
    left_out = ("transformers_version", "_name_or_path", "dtype", "architectures", "id2label", "label2id")
    kept = {key: value for key, value in values.items() if key not in left_out}
    return dict(json.loads(json.dumps(kept, default=str), parse_constant=tagged))


def _layers(model: Any) -> Any:
    """(name, module) of the stack of layers: the ModuleList with the most parameters."""
    from torch.nn import ModuleList

    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, ModuleList)]
    return max(lists, key=lambda named: sum(p.numel() for p in named[1].parameters()), default=("", ModuleList()))


def _owned(name: str, module: Any, kind: str) -> Iterator[tuple[str, str, Any]]:
    """(kind, name, parameter) of all parameters of a module and its submodules."""
    found = next((kind for kind, ending in _KINDS if ending.search(type(module).__name__)), "")
    inner = found if kind in ("", "mlp") and found else kind
    for key, parameter in module.named_parameters(recurse=False):
        yield inner, f"{name}.{key}", parameter
    for key, child in module.named_children():
        yield from _owned(f"{name}.{key}", child, inner)


def _counted(model: Any, stack: tuple[str, Any]) -> dict[str, Any]:
    """Elements per kind, and number of layers with each kind. ``mlp`` counts layers without routed experts only."""
    prefix, layers = stack
    inside: Counter[str] = Counter()
    having: Counter[str] = Counter()
    names, seen, query_norm = [], set(), 0
    for index, layer in enumerate(layers):
        kinds = set()
        for found, name, parameter in _owned(f"{prefix}.{index}", layer, ""):
            kind = found or "mlp"  # some layers own the MLP's matrices directly
            names.append(name)
            if _QUERY_NORM.search(name):
                query_norm = max(query_norm, parameter.numel())
            if id(parameter) in seen:
                kinds.add(kind)
                continue
            seen.add(id(parameter))
            matrix = parameter.dim() >= 2 or kind == "experts"
            inside[kind if matrix else "vectors"] += parameter.numel()
            kinds |= {kind} if matrix else set()
        having.update(kinds - {"mlp"} if "experts" in kinds else kinds)
    head = model.get_output_embeddings()
    weights = [parameter for parameter in model.parameters() if id(parameter) not in seen]
    tied = head is None or head.weight is model.get_input_embeddings().weight
    names_of_first = [type(module).__name__ for module in layers[0].modules()] if len(layers) else []
    # Norms of the layer, not of heads or latent states: two, or four if attention and MLP have norms on both sides.
    norms = [type(module).__name__ for module in layers[0].children() if "Norm" in type(module).__name__]
    matrices = sum(inside.values()) - inside["experts"] - inside["vectors"]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tables": sum(parameter.numel() for parameter in weights if parameter.dim() >= 2),
        "tied": tied,
        "matrices": matrices,
        "mlp": inside["mlp"],
        "recurrent": inside["recurrent"],
        "experts": inside["experts"],
        "layers": len(layers),
        **{f"{kind}_layers": having[kind] for kind in ("attention", "recurrent", "mlp", "experts")},
        "traits": {
            "norm": "rmsnorm" if any("RMSNorm" in name for name in names_of_first) else "layernorm",
            "norm_placement": "both" if len(norms) >= 4 else "input",
            "qk_norm": "none" if not query_norm else "head" if query_norm <= _WIDEST_HEAD else "width",
            "fused_attention": bool(model._supports_sdpa),
            "attention_sinks": any(name.endswith((".sinks", ".sink")) for name in names),
            "fused_qkv": any(map(_ONE_PROJECTION.search, names)),
        },
    }


def answer_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """``described``, or ``refused`` with the exception that transformers raises."""
    try:
        return described(config)
    except Exception as error:  # transformers may raise anything
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


if __name__ == "__main__":
    print(json.dumps(answer_of(json.load(sys.stdin))))
