"""What autograd keeps of a transformers layer whose weights are frozen, with adapters beside its linear layers.

An operator saves its input for the gradient of its weight; a frozen weight has none. So norms do not keep what they
scale, and a linear layer keeps its input only for an adapter (peft, tuners/lora/layer.py, Linear.forward), whose own
weights are fp32: under autocast the input is cast to fp32 and back, and each adapter keeps a copy of its own; without,
the engine has the adapters in 16 bits, and they keep the input that all of them read.
"""

from __future__ import annotations

from kit.cost.setup import Shape, TrainingSetup
from kit.specs.families import Traits


def without_scale(shape: Shape, width: float, element: int) -> float:
    """What a norm keeps whose scale is frozen, per token: its input (RMSNorm's in fp32) and statistics."""
    if shape.norm == "layernorm":
        return element * width + 2 * element
    return 4.0 * width + 4


def with_frozen_weights(setup: TrainingSetup, has_experts: bool, terms: dict[str, float]) -> dict[str, float]:
    """``terms``: of the layer trained whole, bytes per token."""
    shape, element, lora = setup.shape, setup.element, setup.lora
    assert lora is not None
    traits = shape.traits or Traits(norm=shape.norm, gated_mlp=shape.gated_mlp)
    inputs = 1 if shape.parallel_residual and shape.shared_norm else 4 if traits.norm_placement == "both" else 2
    h, f, query = shape.hidden_size, shape.ffn_hidden_size / setup.tp, shape.query_width / setup.tp
    kept = terms | {"norms": inputs * without_scale(shape, h, element)}
    if traits.qk_norm == "head" and "qk_norm" in terms:
        kept["qk_norm"] = terms["qk_norm"] * 4 / (8 if traits.zero_centred_norm else 4 + element)
    copies = setup.autocast
    attention = "query" in lora.targets
    of_mlp = "mlp" in lora.targets and not has_experts
    fused = shape.family in ("gpt2", "gpt_neox", "phi3", "bloom", "falcon")
    matrices = 1 if fused or not copies else 3
    kept["adapters"] = element * (h * matrices + (query if copies else 0)) if attention else 0.0
    if not has_experts:
        # The input of the last matrix is among what a whole layer keeps.
        if not of_mlp:
            kept["mlp"] = terms["mlp"] - (element * f if shape.gated_mlp or traits.activation != "relu" else 0)
        elif copies:
            kept["adapters"] += element * h * (2 if shape.gated_mlp and shape.family != "phi3" else 1)
        else:
            kept["adapters"] += element * h
    number = (4 if attention else 0) + ((3 if shape.gated_mlp else 2) if of_mlp else 0)
    kept["adapters"] += element * lora.rank * number
    return kept
