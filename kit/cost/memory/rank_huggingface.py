"""Memory of a rank that runs a Hugging Face model, with or without tensor parallelism (engines torch and deepspeed)."""

from __future__ import annotations

from kit.cost.hardware import cublas_workspaces
from kit.cost.memory.activations_huggingface import (
    after_layers,
    cross_attention,
    fp8_cast_workspace,
    generation_bytes,
    kept_inputs,
    layer_bytes,
    layer_input,
    layer_terms,
    loss_bytes,
    saved_by_policy,
)
from kit.cost.memory.parts import EngineMemory, RankParts
from kit.cost.memory.states import StateBytes
from kit.cost.model.lora import dora_sizes
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.specs.layout import mlp_tiles


def rank_parts(workload: Workload, engine: EngineMemory, states: StateBytes, stage: int) -> RankParts:
    """Memory of a rank by part; all ranks are alike, since these engines have one pipeline stage."""
    model, recompute = workload.model, workload.layout.recompute
    counts = [(bool(kind), number) for kind, number in enumerate(workload.stages.stage_kinds[stage]) if number]
    whole = {kind: layer_bytes(workload, kind) for kind, _ in counts}
    after_forward, in_loss = engine.autocast_copies
    decoders = model.num_layers if model.is_encoder_decoder else 0
    crossed = cross_attention(workload) if decoders else 0.0
    saved = sum(number * _saved(workload, whole[kind]) for kind, number in counts)
    if recompute == "full" and workload.job.lora is not None:
        saved += sum(number * kept_inputs(workload, kind) for kind, number in counts)
    saved += decoders * crossed if recompute != "full" else 0.0
    # An encoder has a final norm too; all decoder layers read its output.
    of_final_norm = after_layers(workload)
    saved += of_final_norm * (2 if decoders else 1)
    recomputed = max(whole.values()) + crossed if recompute == "full" else 0.0
    workspace, freed = _backward_workspace(workload, any(kind for kind, _ in counts)), 0.0
    if (recompute == "full" or workload.recomputes_by_operator) and _described_in_full(workload):
        recomputed, workspace, freed = recomputed_layer_bytes(workload), 0.0, of_final_norm
        if workload.recomputes_by_operator:  # what the layer has saved takes part in its recomputation
            recomputed -= saved_by_policy(workload) - layer_input(workload)
    if workload.layout.activation_offloading:
        # The input of the layer before is on its way back (kit/engines/kernels/offloaded_inputs.py). The layer's own
        # is among its saved tensors, if an operator saves it; otherwise it is free when the recompute ends.
        recomputed += layer_input(workload)
    workspace += engine.deferred_head_gradient
    if workload.job.lora is not None:
        workspace = max(workspace, dora_sizes(model, workload.job.lora)[2])
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
        states=states._replace(weights=states.weights + reference_bytes(workload)),
        buffers=engine.buffers + cublas_workspaces(workload.generation),
        gathered_in_loss=engine.gathered[0],
        gathered=engine.gathered[1],
        gathered_at_end=at_end,
        buffers_in_loss=in_loss,
        casts_in_forward=casts,
        saved_activations=saved,
        freed_before_layers=freed,
        recomputed_layer=recomputed,
        backward_workspace=workspace,
        loss=loss_bytes(workload),
        generation=generation_bytes(workload),
        load=engine.load,
        save=engine.save,
    )


def _saved(workload: Workload, whole: float) -> float:
    """Bytes that one layer saves for one micro batch; ``whole``: the same without recompute."""
    if workload.activation_offload:
        return 0.0
    if workload.layout.recompute == "full":
        return layer_input(workload)
    return saved_by_policy(workload) if workload.recomputes_by_operator else whole


def _described_in_full(workload: Workload) -> bool:
    """Whether ``recomputed_layer_bytes`` describes the layers."""
    model = workload.model
    known = model.approximate is None and not model.num_experts and not model.is_encoder_decoder
    return known and workload.job.lora is None


def _backward_workspace(workload: Workload, has_experts: bool) -> float:
    """Peak bytes of gradients of a layer's intermediate tensors, in the backward of the MLP.

    Per token, and per expert of a token: three gradients of the MLP's width (activation, gate, up) and two of the
    hidden size. With many experts the gradient of gate_up_proj, one tensor for all experts, may be larger; the saved
    tensors of activation and output are freed by then.
    """
    model, h, tp = workload.model, workload.model.hidden_size, workload.layout.tp
    if workload.layout.tiled_mlp:
        return max(_tiles(workload), _norm(workload), attention_backward(workload)) * workload.tokens
    if not has_experts:
        return workload.element * (3 * model.ffn_hidden_size / tp + 2 * h) * workload.tokens
    routed, width = workload.routed_per_token * workload.tokens, model.moe_ffn_hidden_size
    experts = model.num_experts / workload.layout.ep
    of_weights = (2 if model.gated_mlp else 1) * width * (experts * h - routed) - h * routed
    return workload.element * max(routed * (3 * width / tp + 2 * h), of_weights)


def recomputed_layer_bytes(workload: Workload) -> float:
    """Peak bytes of one dense layer's saved tensors and gradients, for one micro batch, without its input, while full
    recompute runs its forward again and then its backward.

    The layer's tensors are freed from its end to its beginning, so three moments may be the fullest: the MLP's
    backward, that of the norm before it, and that of attention. The terms were read from transformers' modules, from
    kit/engines/kernels and from torch's CUDA kernels; the probe counts the same (benchmarks/tests). With long sequences
    these tensors are most of a rank's memory.
    """
    terms = layer_terms(workload, False)
    attention = sum(terms.values()) - terms["mlp"]
    if not workload.model.parallel_residual and workload.model.traits.norm_placement == "input":
        attention -= terms["norms"] / 2
    residual = layer_input(workload) / workload.tokens  # the gradient that goes around the layer
    moments = (
        sum(terms.values()) + (_tiles(workload) if workload.layout.tiled_mlp else _mlp(workload)),
        sum(terms.values()) - terms["mlp"] + _norm(workload),
        attention + attention_backward(workload),
    )
    return (residual + max(moments)) * workload.tokens


def _tiles(workload: Workload) -> float:
    """Bytes per token of a tiled MLP's backward: what one tile saves, its gradients, and the gradients of all tiles'
    inputs, which are joined at the end."""
    layout, each = workload.layout, workload.element * workload.model.hidden_size
    whole = workload.with_layout(layout.but(tiled_mlp=False))
    saved = sum(layer_terms(whole, False).values()) - sum(layer_terms(workload, False).values())
    of_tile = (saved + _mlp(whole) + each) / mlp_tiles(workload.job.seq_length // layout.cp, workload.model.hidden_size)
    return each + max(each, of_tile)


def _mlp(workload: Workload) -> float:
    """Bytes per token of the MLP's gradients. A gated MLP has three of its width when it has freed its product."""
    model, width = workload.model, workload.element * workload.model.ffn_hidden_size / workload.layout.tp
    frees = model.gated_mlp and not model.traits.eager_gelu and model.traits.norm_placement == "input"
    return 2 * width if frees else 3 * width + workload.element * model.hidden_size


def _norm(workload: Workload) -> float:
    """Bytes per token that the backward of a norm has beside the layer's saved tensors. RMSNorm is nine operators in
    fp32: five temporaries, less the output and the tensor before the scale, which are freed."""
    model, h = workload.model, workload.model.hidden_size
    if model.norm == "layernorm":
        return workload.element * h
    return 20.0 * h - (2 * workload.element * h if model.traits.norm_placement == "input" else 0)


def attention_backward(workload: Workload) -> float:
    """Bytes per token of gradients and buffers in attention's backward, beside what the layer saved.

    FlashAttention-2 sums the query's gradient in fp32, and writes gradients of keys and values for every query head
    (aten/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd). The ring's first round is its fullest: fp32 sums
    of all gradients, the next rank's keys and values on their way, and its own repeated for all query heads. Ulysses
    has other heads and more tokens, of which a rank has as many bytes.
    """
    model, layout, element = workload.model, workload.layout, workload.element
    heads = model.num_attention_heads / layout.tp
    query, value = model.query_width / layout.tp, model.value_width / layout.tp
    own = 2 * model.key_value_width / layout.tp if model.latent is None else query + value
    repeated = query + value if model.latent is not None else 2 * query
    total = element * value  # the gradient of its result
    if not model.traits.fused_attention:
        return total + layer_terms(workload, False)["core_attn"] + element * (query + repeated)
    total += element * (query + repeated)
    in_fp32 = 4 * (query + heads) if workload.cluster.gpu.device == "cuda" and element == 2 else 0
    if layout.cp == 1 or layout.cp_comm_type != "p2p":
        return total + max(in_fp32, element * own if own < repeated else 0)
    return total + max(in_fp32, 4 * own / 2) + 4 * (query + own) + element * (own + repeated)


def reference_bytes(workload: Workload) -> float:
    """Bytes of the reference model on a GPU; 0 where its weights are offloaded.

    With LoRA it is the model with its adapters switched off. TRL loads it in fp32 and gives it to FSDP2 like the model.
    Under DeepSpeed it has the engine's precision, sharded at stage 3 and otherwise whole (trl/models/utils.py,
    prepare_deepspeed).
    """
    layout = workload.layout
    if not workload.holds_reference or layout.offload_param != "none":
        return 0.0
    sharded = layout.zero_stage >= (2 if layout.engine == "torch" else 3)
    each = workload.weight_bytes if layout.engine == "torch" else workload.element
    return each * count(workload.model).total / (layout.dp if sharded else 1)
