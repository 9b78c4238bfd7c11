"""Memory of a rank that runs a Hugging Face model whole, or cut by tensor parallelism: torch and DeepSpeed."""

from __future__ import annotations

from kit.cost.memory.activations_huggingface import (
    after_layers,
    chunk_entries,
    cross_attention,
    layer_bytes,
    layer_input,
    layer_terms,
    loss_bytes,
)
from kit.cost.memory.phases import RankParts, cublas_workspaces
from kit.cost.memory.rank_states import EngineMemory, RankStates
from kit.cost.setup import TrainingSetup
from kit.cost.stages import kinds, layers_on_stage
from kit.cost.time import fp8_casts


def rank_parts(setup: TrainingSetup, engine: EngineMemory, states: RankStates, stage: int) -> RankParts:
    """Memory of any rank in parts: these engines have one pipeline stage."""
    dense, experts = kinds(setup.shape, layers_on_stage(setup, stage))
    counts = [(kind, count) for kind, count in ((False, dense), (True, experts)) if count]
    whole = {kind: layer_bytes(setup, kind) for kind, _ in counts}
    after_forward, in_loss = engine.autocast_copies
    crossing = setup.shape.cross_attention_layers
    crossed = cross_attention(setup) if crossing else 0.0
    # An encoder has a final norm too, whose result all layers of the decoder read.
    ends = after_layers(setup) * (2 if crossing else 1)
    again = max(whole.values()) + crossed if setup.recompute == "full" else 0.0
    working = _working(setup, bool(experts)) + engine.waiting_gradient
    if setup.fp8 is not None:
        working += fp8_casts.cast_workspace_bytes(setup, setup.compiled_layers)
    at_end = engine.gathered[2]
    if engine.root_is_last:
        # The first layer's backward with what is gathered for it, or the root's without any layer.
        at_end = max(engine.gathered[1], at_end - again - working)
    return RankParts(
        states=states,
        buffers=engine.buffers + cublas_workspaces(setup.gpu_generation),
        gathered_in_loss=engine.gathered[0],
        gathered=engine.gathered[1],
        gathered_at_end=at_end,
        buffers_in_loss=in_loss,
        # Casts of weights are cached until the forward pass leaves autocast, before the loss is computed.
        casts_in_forward=(after_forward, 2.0 * chunk_entries(setup)) if after_forward > in_loss else (0.0, 0.0),
        kept=sum(count * _kept(setup, kind, whole[kind]) for kind, count in counts)
        + (crossing * crossed if setup.recompute != "full" else 0.0)
        + ends,
        again=again,
        working=working,
        loss=loss_bytes(setup),
        load=engine.load * setup.parameters[stage].total or None,
        save=4.0 * engine.largest_parameter,
    )


def _kept(setup: TrainingSetup, has_experts: bool, whole: float) -> float:
    if setup.recompute == "full":
        return layer_input(setup)
    if setup.recompute == "selective":
        return whole - layer_terms(setup, has_experts)["core_attn"] * setup.tokens
    return whole


def _working(setup: TrainingSetup, has_experts: bool) -> float:
    """Gradients of a layer's intermediate results that exist at once, in the backward of the MLP.

    Three of its width (product, gate and up), two of the hidden size, for each expert of a token. Or, fuller with many
    experts: the gradient of all their gate and up projections, one tensor, when what the product and the output kept
    has gone.
    """
    shape, h = setup.shape, setup.shape.hidden_size
    if not has_experts or shape.experts is None:
        return setup.element * (3 * shape.ffn_hidden_size / setup.tp + 2 * h) * setup.tokens
    moe = shape.experts
    routed = moe.experts_per_token * setup.tokens
    of_weights = (2 if shape.gated_mlp else 1) * moe.ffn_hidden_size * (moe.num_experts * h - routed) - h * routed
    return setup.element * max(routed * (3 * moe.ffn_hidden_size / setup.tp + 2 * h), of_weights)
