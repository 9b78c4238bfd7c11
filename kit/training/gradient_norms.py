"""Gradient norms of groups of parameters: which part of the model has the large gradients."""

from __future__ import annotations

import math
import re
from collections import defaultdict

from kit.engines.collective import gather
from kit.engines.protocol import Engine, StateKind


def gradient_norms(engine: Engine) -> dict[str, float]:
    """Collective, between ``forward_backward`` and ``apply``. L2 norm of each group's gradient before clipping. Groups
    are the parts of a layer, each over all layers, and the modules outside of layers. Reads every gradient once."""
    squares: defaultdict[str, float] = defaultdict(float)
    for block in engine.export_blocks([StateKind.GRADIENT]):
        squares[group_of(block.name)] += float(block.values.double().square().sum())
    ranks = gather(dict(squares))
    groups = sorted({group for of_rank in ranks for group in of_rank})
    return {group: math.sqrt(sum(of_rank.get(group, 0.0) for of_rank in ranks)) for group in groups}


def group_of(name: str) -> str:
    """Group of a tensor by its Hugging Face name: ``self_attn`` of ``model.layers.0.self_attn.q_proj.weight``, and
    ``embed_tokens`` of ``model.embed_tokens.weight``."""
    within_layer = re.search(r"\.\d+\.([^.]+)", name)
    return within_layer[1] if within_layer else name.split(".")[-2]
