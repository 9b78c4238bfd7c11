"""torchtitan's Llama in a distributed checkpoint: its names and its order of rotated rows, as Hugging Face has them.

torchtitan 0.3.0, models/llama3/state_dict_adapter.py: names, and rotary embedding of neighbouring rows, where Hugging
Face rotates the first half of a head with the second (``_permute``). models/common/attention.py,
``FusedQKVLinear._split_qkv_on_save``: weights are saved as query, key and value; Adam's moments stay fused, for each
key/value head its queries, its key, its value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

import torch

from kit.addons.importers.stored import StoredState, StoredTensor
from kit.addons.importers.tensors import plain_name
from kit.errors import CheckpointError
from kit.specs.model import ModelSpec

EMBEDDING = "tok_embeddings.weight"
_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "output": "lm_head",  # 0.2 and before
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_QKV = re.compile(r"attention\.(?:qkv_linear\.)?w(q|k|v|qkv)")


def is_torchtitan(state: StoredState) -> bool:
    """Whether the weights have torchtitan's names."""
    return EMBEDDING in state.weights


def as_hugging_face(state: StoredState, model: ModelSpec) -> StoredState:
    """State whose tensors have Hugging Face names. Raises CheckpointError for models other than a dense Llama."""
    if model.family != "llama":
        raise CheckpointError(
            f"the checkpoint has torchtitan's names, of which kit reads Llama's, and {model.name} is of family "
            f"{model.family}; save it by torchtitan with checkpoint.last_save_in_hf and give that directory"
        )
    return dataclasses.replace(
        state,
        weights=dict(_renamed(state.weights, model)),
        moments={kind: dict(_renamed(found, model)) for kind, found in state.moments.items()},
    )


def _renamed(stored: Mapping[str, StoredTensor], model: ModelSpec) -> Iterator[tuple[str, StoredTensor]]:
    for name, tensor in stored.items():
        match = _LAYER.fullmatch(plain_name(name))
        before, inner = ("", plain_name(name).removesuffix(".weight")) if match is None else (match[1], match[2])
        block = f"model.layers.{before}." if match else ""
        if fused := _QKV.fullmatch(inner):
            for part in fused[1]:
                yield f"{block}self_attn.{part}_proj.weight", _projection(name, tensor, model, part, fused[1] == "qkv")
        elif inner in _NAMES:
            yield f"{block}{_NAMES[inner]}.weight", tensor
        else:
            raise CheckpointError(
                f"{name} is not a tensor of torchtitan's Llama, which is all that kit reads of it; save it by "
                f"torchtitan with checkpoint.last_save_in_hf and give that directory"
            )


def _projection(name: str, tensor: StoredTensor, model: ModelSpec, part: str, fused: bool) -> StoredTensor:
    groups, size = model.num_key_value_heads, model.head_dim
    heads = model.num_attention_heads if part == "q" else groups
    rows = (model.num_attention_heads + 2 * groups if fused else heads) * size
    if tensor.shape != (rows, model.hidden_size):
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)} in the checkpoint and {model.name} has "
            f"{[rows, model.hidden_size]}; give the model of the checkpoint by --model"
        )

    def read() -> torch.Tensor:
        found = tensor.read()
        if fused:
            grouped = found.view(groups, -1, size, model.hidden_size)
            first = {"q": 0, "k": grouped.shape[1] - 2, "v": grouped.shape[1] - 1}[part]
            found = grouped.narrow(1, first, heads // groups).reshape(heads * size, model.hidden_size)
        return found if part == "v" else as_halves(found, heads)

    return StoredTensor((heads * size, model.hidden_size), tensor.dtype, read)


def as_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head, of which neighbours are rotated together, in the order in which its halves are."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
