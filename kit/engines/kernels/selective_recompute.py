"""Selective recompute by torch's checkpoint policies: what is dear to compute is saved, the rest is computed again.

torchtitan's list (torchtitan/distributed/activation_checkpoint.py): attention's result, and every second of the layer's
GEMMs. Norms, rotations, activations and the other products run again in backward.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


def contexts() -> tuple[Any, Any]:
    """``context_fn`` of torch's checkpoint, which calls it once for each forward of a layer."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            # Recompute goes through the operators once more, and must find the same choices.
            products[context.is_recompute] += 1
            saved = products[context.is_recompute] % 2 == 1
        else:
            saved = operator in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    caching, recomputing = create_selective_checkpoint_contexts(policy)
    return caching, recomputing
