"""Names of parameters in megatron-core's distributed checkpoints.

If all layers are equal, a parameter of all layers is one tensor with the layer as first dimension. If layers differ,
names contain the layer's number. All experts are one tensor with the expert as next dimension
(transformer/transformer_block.py and transformer/moe/experts.py, ``sharded_state_dict``). Norms have the names of
Transformer Engine's fused layers, also with megatron-core's local layers (models/gpt/gpt_layer_specs.py,
``sharded_state_dict_keys_map``).
"""

from __future__ import annotations

from dataclasses import dataclass

from kit.engines.protocol import StateKind
from kit.specs.model import ModelSpec

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
    parts = name.split(".")
    index: list[int] = []
    counts: list[int] = []
    in_decoder = parts[:2] == ["decoder", "layers"]
    in_layer = in_decoder or "transformer_layer" in parts
    in_dense_layer = in_decoder and not model.has_experts(int(parts[2]))
    if in_decoder and not model.first_dense_layers:
        index, counts = [int(parts.pop(2))], [model.num_layers]
    if "local_experts" in parts:
        place = parts.index("local_experts")
        index.append(int(parts.pop(place + 1)))
        counts.append(model.num_experts)
        parts[place] = "experts"
    key = ".".join(parts)
    for plain, fused in _FUSED_NORMS.items():
        # Transformer Engine cannot fuse the norm before experts.
        if in_layer and (in_dense_layer or not plain.startswith("pre_mlp")):
            key = key.replace(f".{plain}", f".{fused}")
    return StoredLocation(PREFIXES[kind] + key, tuple(index), tuple(counts))
