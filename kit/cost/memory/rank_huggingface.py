"""Memory of a rank that runs a Hugging Face model, with or without tensor parallelism (engines torch and deepspeed)."""

from __future__ import annotations

from kit.cost.memory.activations_huggingface import (
    after_layers,
    cross_attention,
    fp8_cast_workspace,
    layer_bytes,
    layer_input,
    layer_terms,
    loss_bytes,
)
from kit.cost.memory.phases import EngineMemory, RankParts, RankStates, cublas_workspaces
from kit.cost.workload import Workload


def rank_parts(workload: Workload, engine: EngineMemory, states: RankStates, stage: int) -> RankParts:
    """Memory of a rank by part; all ranks are alike, since these engines have one pipeline stage."""
    model, recompute = workload.model, workload.layout.recompute
    counts = [(bool(kind), count) for kind, count in enumerate(workload.stage_kinds[stage]) if count]
    whole = {kind: layer_bytes(workload, kind) for kind, _ in counts}
    after_forward, in_loss = engine.autocast_copies
    decoders = model.num_layers if model.is_encoder_decoder else 0
    crossed = cross_attention(workload) if decoders else 0.0
    saved = sum(count * _saved(workload, kind, whole[kind]) for kind, count in counts)
    saved += decoders * crossed if recompute != "full" else 0.0
    # An encoder has a final norm too; all decoder layers read its output.
    saved += after_layers(workload) * (2 if decoders else 1)
    recomputed = max(whole.values()) + crossed if recompute == "full" else 0.0
    workspace = _backward_workspace(workload, any(kind for kind, _ in counts)) + engine.deferred_head_gradient
    if workload.job.precision == "fp8":
        workspace += fp8_cast_workspace(workload)
    at_end = engine.gathered[2]
    if engine.root_is_last:
        # The larger of two moments: the first layer's backward with its gathered weights, and the root's reduction
        # without any layer.
        at_end = max(engine.gathered[1], at_end - recomputed - workspace)
    # autocast caches casts of weights until the forward pass ends, before the loss.
    casts = (after_forward, 2.0 * model.vocab_size * workload.chunk_tokens) if after_forward > in_loss else (0.0, 0.0)
    return RankParts(
        states=states,
        buffers=engine.buffers + cublas_workspaces(workload.generation),
        gathered_in_loss=engine.gathered[0],
        gathered=engine.gathered[1],
        gathered_at_end=at_end,
        buffers_in_loss=in_loss,
        casts_in_forward=casts,
        saved_activations=saved,
        recomputed_layer=recomputed,
        backward_workspace=workspace,
        loss=loss_bytes(workload),
        load=engine.load * workload.parameters[stage].total or None,
        save=4.0 * engine.largest_parameter,
    )


def _saved(workload: Workload, has_experts: bool, whole: float) -> float:
    """Bytes that one layer saves for one micro batch; ``whole``: the same without recompute."""
    if workload.activation_offload:
        return 0.0
    if workload.layout.recompute == "full":
        return layer_input(workload)
    if workload.layout.recompute == "selective":
        return whole - layer_terms(workload, has_experts)["core_attn"] * workload.tokens
    return whole


def _backward_workspace(workload: Workload, has_experts: bool) -> float:
    """Peak bytes of gradients of a layer's intermediate tensors, in the backward of the MLP.

    Per token, and per expert of a token: three gradients of the MLP's width (activation, gate, up) and two of the
    hidden size. With many experts the gradient of gate_up_proj, one tensor for all experts, may be larger; the saved
    tensors of activation and output are freed by then.
    """
    model, h, tp = workload.model, workload.model.hidden_size, workload.layout.tp
    if not has_experts:
        return workload.element * (3 * model.ffn_hidden_size / tp + 2 * h) * workload.tokens
    routed, width = model.experts_per_token * workload.tokens, model.moe_ffn_hidden_size
    of_weights = (2 if model.gated_mlp else 1) * width * (model.num_experts * h - routed) - h * routed
    return workload.element * max(routed * (3 * width / tp + 2 * h), of_weights)
