"""Names of parameters in megatron-core's distributed checkpoints.

If all layers are equal, a parameter of all layers is one tensor with the layer as first dimension. If layers differ,
names contain the layer's number. All experts are one tensor with the expert as next dimension
(transformer/transformer_block.py and transformer/moe/experts.py, ``sharded_state_dict``). Norms have the names of
Transformer Engine's fused layers, also with megatron-core's local layers (models/gpt/gpt_layer_specs.py,
``sharded_state_dict_keys_map``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kit.engines.protocol import StateKind
from kit.specs.model import ModelSpec

_LAYER, _EXPERT = re.compile(r"decoder\.layers\.(\d+)\."), re.compile(r"\blocal_experts\.(\d+)\.")
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
WEIGHT = "weight"
"""Kind of the model's own weights, in the precision of the layers. The other kinds are those of ``StateKind``."""
PREFIXES = {
    WEIGHT: "",
    StateKind.MASTER: "optimizer.state.param.",
    StateKind.EXP_AVG: "optimizer.state.exp_avg.",
    StateKind.EXP_AVG_SQ: "optimizer.state.exp_avg_sq.",
}
"""Kind → what the keys of its tensors begin with."""


@dataclass(frozen=True)
class StoredLocation:
    """Location of a parameter: at ``index`` in the leading dimensions of tensor ``key``, whose sizes are ``counts``."""

    key: str
    index: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    def block(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(shape of the tensor, offsets, sizes) of the block that is a parameter of ``shape``."""
        return self.counts + shape, self.index + (0,) * len(shape), (1,) * len(self.index) + shape


def stored_location(name: str, kind: str, model: ModelSpec) -> StoredLocation:
    """Location of one kind of state of a parameter. ``name`` counts layers and experts over the whole model."""
    layer = _LAYER.match(name)
    in_layer = layer is not None or "transformer_layer" in name.split(".")
    in_dense_layer = layer is not None and not model.has_experts(int(layer[1]))
    index: list[int] = []
    counts: list[int] = []
    stacked = (_LAYER, "decoder.layers.", 0 if model.first_dense_layers else model.num_layers)
    for pattern, plain, count in (stacked, (_EXPERT, "experts.", model.num_experts)):
        if count and (number := pattern.search(name)):
            index.append(int(number[1]))
            counts.append(count)
            name = name.replace(number[0], plain, 1)
    for plain, fused in _FUSED_NORMS.items():
        # Transformer Engine cannot fuse the norm before experts.
        if in_layer and (in_dense_layer or not plain.startswith("pre_mlp")):
            name = name.replace(f".{plain}", f".{fused}")
    return StoredLocation(PREFIXES[kind] + name, tuple(index), tuple(counts))
