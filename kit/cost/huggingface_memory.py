"""Memory of a rank that runs a Hugging Face model whole, or cut by tensor parallelism: torch and DeepSpeed."""

from __future__ import annotations

from kit.cost.huggingface_layer import LOSS_BYTES, after_layers, layer_bytes, layer_input, layer_terms
from kit.cost.megatron_memory import MIB
from kit.cost.rank_memory import RankParts
from kit.cost.rank_states import rank_states
from kit.cost.setup import TrainingSetup
from kit.cost.stages import kinds, stage_layers


def rank_parts(setup: TrainingSetup, stage: int) -> RankParts:
    """Of any rank: these engines have one pipeline stage."""
    planned = setup.planned
    assert planned is not None
    dense, experts = kinds(setup.shape, stage_layers(setup, stage))
    counts = [(kind, count) for kind, count in ((False, dense), (True, experts)) if count]
    whole = {kind: layer_bytes(setup, kind) for kind, _ in counts}
    entries = setup.shape.vocab_size * setup.tokens
    after_forward, in_loss = planned.autocast_copies
    return RankParts(
        states=rank_states(setup, stage),
        buffers=planned.buffers + _workspaces(setup),
        gathered_in_loss=planned.gathered[0],
        gathered=planned.gathered[1],
        gathered_at_end=planned.gathered[2],
        buffers_in_loss=in_loss,
        # Casts of weights are cached until the forward pass leaves autocast, before the loss is computed.
        casts_in_forward=(after_forward, 2.0 * entries) if after_forward > in_loss else (0.0, 0.0),
        kept=sum(count * _kept(setup, kind, whole[kind]) for kind, count in counts) + after_layers(setup),
        again=max(whole.values()) if setup.recompute == "full" else 0.0,
        working=_working(setup, bool(experts)),
        loss=LOSS_BYTES * entries,
        load=planned.load * planned.parameters[stage].total or None,
        save=4.0 * planned.largest_parameter,
    )


def _kept(setup: TrainingSetup, has_experts: bool, whole: float) -> float:
    if setup.recompute == "full":
        return layer_input(setup)
    if setup.recompute == "selective":
        return whole - layer_terms(setup, has_experts)["core_attn"] * setup.tokens
    return whole


def _working(setup: TrainingSetup, has_experts: bool) -> float:
    """Gradients of a layer's intermediate results that exist at once, in the backward of the MLP.

    Three of its width (product, gate and up), two of the hidden size, for each expert of a token.
    """
    shape = setup.shape
    times, width = 1, shape.ffn_hidden_size
    if has_experts and shape.experts is not None:
        times, width = shape.experts.experts_per_token, shape.experts.ffn_hidden_size
    return setup.element * times * (3 * width / setup.tp + 2 * shape.hidden_size) * setup.tokens


def _workspaces(setup: TrainingSetup) -> float:
    """cuBLAS's, of the thread that runs forward and of autograd's (see ``megatron_memory.workspace_bytes``)."""
    return 2 * (32 * MIB if setup.gpu_generation in ("hopper", "blackwell") else 8.125 * MIB)
