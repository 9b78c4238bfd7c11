"""Memory of a rank with Megatron's layers: saved activations, loss, workspaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import mul

from kit.cost.hardware import LARGE_WORKSPACES, MIB, cublas_workspaces
from kit.cost.memory import activations_megatron, activations_transformer_engine
from kit.cost.memory.parts import EngineMemory, RankParts
from kit.cost.memory.states import StateBytes
from kit.cost.model.pipeline import in_flight
from kit.cost.workload import Workload

GROUPED_STREAMS = 4
"""Streams of a grouped GEMM, each with a workspace (transformer_engine, num_cublas_streams)."""
MEGATRON_LOSSES = {"unfused": (4, 6), "native": (4, 10), "te": (2, 2), "scores": (0, 0)}
"""Loss of 16-bit logits → bytes per logit: (kept since an earlier loss, at the fullest moment of the last one).

unfused: 16-bit logits and one fp32 copy, on which it computes in place (tensor_parallel/cross_entropy.py). native: the
same compiled (fusions/fused_cross_entropy.py); measured, one fp32 copy more: compiled, the subtraction is not in place.
te: gradients overwrite the 16-bit logits (transformer_engine/pytorch/triton/cross_entropy.py). scores: the head has a
few outputs instead of the vocabulary.
"""


def rank_parts(workload: Workload, engine: EngineMemory, states: StateBytes, stage: int) -> RankParts:
    """Memory of a rank of one pipeline stage in parts."""
    last = stage == workload.layout.pp - 1
    recomputed = 0.0
    if workload.layout.recompute != "none":
        kinds = enumerate(workload.stages.stage_kinds[stage])
        recomputed = max((_recomputed(workload, bool(kind)) for kind, count in kinds if count), default=0.0)
    saved = saved_activations(workload, stage)
    # The retained gradients of all layers exist in the first layer's backward; the final norm's tensors are freed by
    # then.
    retained = retained_input_gradients(workload, stage)
    workspace = backward_workspace(workload, stage)
    workspace += max(0.0, retained - (after_last_layer(workload) if last else 0.0))
    deferred, loss = loss_parts(workload) if last else (0.0, 0.0)
    return RankParts(
        states=states,
        buffers=workspace_bytes(workload, stage) + engine.buffers,
        gathered_in_loss=engine.gathered[0],
        gathered=engine.gathered[1],
        gathered_at_end=engine.gathered[2],
        saved_activations=saved,
        recomputed_layer=recomputed,
        backward_workspace=workspace,
        deferred_gradients=deferred,
        loss=loss,
        after_backward=_beyond_the_first_layer(
            workload, stage, recomputed + workspace, retained + saved if retained else 0.0
        ),
        load=engine.load,
        save=engine.save,
    )


def layer_terms(workload: Workload, has_experts: bool) -> dict[str, float]:
    """Bytes that one micro batch saves of one layer, without recompute, by operator."""
    if workload.implementation == "local":
        return activations_megatron.layer_terms(workload, has_experts)
    return activations_transformer_engine.layer_terms(workload, has_experts)


def saved_terms(workload: Workload, has_experts: bool) -> dict[str, float]:
    """Bytes by operator that one layer still saves under selective recompute (megatron-core,
    transformer/transformer_config.py, recompute_modules, and CheckpointWithoutOutput)."""
    terms, modules = layer_terms(workload, has_experts), workload.recompute_modules
    if "moe" in modules:  # the whole layer of experts, from its norm's output
        modules |= {"router", "experts", "moe_act", "shared_experts"}
    if "mlp" in modules and not has_experts and "layernorm" in terms:
        terms["layernorm"] /= 2  # Transformer Engine computes the MLP's norm in its first linear layer
    for name in modules:
        terms.pop(name, None)
    return terms


def _recomputed(workload: Workload, has_experts: bool) -> float:
    """Bytes that backward computes again for one layer."""
    whole = sum(layer_terms(workload, has_experts).values())
    return whole if workload.layout.recompute == "full" else whole - sum(saved_terms(workload, has_experts).values())


def layer_input(workload: Workload) -> float:
    """Bytes of a layer's input for one micro batch. Full recompute saves only this."""
    return workload.element * workload.model.hidden_size * workload.shard_tokens


def layer_saved(workload: Workload, has_experts: bool) -> float:
    """Bytes that one layer saves for one micro batch."""
    if workload.layout.recompute == "full":
        return layer_input(workload)
    return sum(saved_terms(workload, has_experts).values())


ChunkBytes = Callable[[Workload, tuple[int, ...]], float]


def saved_activations(workload: Workload, stage: int, chunk_bytes: ChunkBytes | None = None) -> float:
    """Bytes saved for backward on a rank of ``stage``, over all micro batches in flight. ``chunk_bytes`` gives the
    bytes that one micro batch saves in the layers of a chunk; None: the sum of ``layer_saved``."""
    pp = workload.layout.pp
    counts = in_flight(pp, workload.layout.vp, workload.layout.gradient_accumulation_steps, stage)
    if chunk_bytes:
        chunks = zip(workload.chunks[stage::pp], counts, strict=True)
        total = sum(count * chunk_bytes(workload, layers) for layers, count in chunks)
    else:
        layers = _layers_in_flight(workload.stages.chunk_kinds[stage::pp], counts)
        total = sum(number * layer_saved(workload, bool(kind)) for kind, number in enumerate(layers) if number)
    if workload.hidden_dropout and stage == 0:
        total += counts[0] * workload.model.hidden_size * workload.shard_tokens
    last = counts[-1] if stage == pp - 1 else 0
    total += last * after_last_layer(workload, chunk_bytes) if last else 0.0
    return total + (sum(counts) - last) * layer_input(workload) if workload.keeps_outputs else total


@lru_cache(maxsize=4096)
def _layers_in_flight(chunks: tuple[tuple[int, int], ...], counts: tuple[int, ...]) -> tuple[int, int]:
    """(dense layers, layers with experts), each as often as it has micro batches in flight."""
    dense, experts = zip(*chunks, strict=True)
    return sum(map(mul, dense, counts)), sum(map(mul, experts, counts))


def after_last_layer(workload: Workload, chunk_bytes: ChunkBytes | None = None) -> float:
    """Bytes that one micro batch saves after the last layer: the final norm, and the layers of multi-token prediction
    with their norms and projection."""
    hidden, last = layer_input(workload), workload.model.num_layers - 1
    if not workload.mtp_layers:
        return 2 * hidden
    saved = chunk_bytes(workload, (last,)) if chunk_bytes else layer_saved(workload, workload.model.has_experts(last))
    return 2 * hidden + workload.mtp_layers * (saved + 6 * hidden)


def logits(workload: Workload) -> float:
    """Elements of one micro batch's logits on a rank of the last stage."""
    return -(-workload.model.vocab_size // workload.layout.tp) * workload.tokens


def loss_parts(workload: Workload) -> tuple[float, float]:
    """(Bytes kept since the losses of multi-token prediction, peak bytes of head and loss). In fp32 the loss is
    computed in place throughout."""
    entries = logits(workload)
    kept, fullest = MEGATRON_LOSSES[workload.cross_entropy]
    if fullest and workload.weight_bytes == 4:
        kept, fullest = 4, 4
    if workload.implementation == "local":
        return kept * entries * workload.mtp_layers, activations_megatron.local_loss_bytes(workload, entries)
    return kept * entries * workload.mtp_layers, fullest * entries


def backward_workspace(workload: Workload, stage: int) -> float:
    """Peak bytes of what one layer has beside what it saves: gradients of the MLP's inner tensors or of the attention
    scores in backward; or copies of the routed tokens in the forward of experts (its second time under recompute).

    Until a layer of experts returns it holds the routed tokens as they are sent and, where other ranks send some, as
    they arrive (megatron-core, moe/moe_layer.py, custom_forward); beside them stand the experts' outputs by expert and
    by sender (moe/token_dispatcher.py, combine_preprocess).
    """
    if workload.implementation == "local":
        return activations_megatron.backward_workspace_bytes(workload, workload.stages.stage_kinds[stage][1] > 0)
    model, tp, element = workload.model, workload.layout.tp, workload.element
    hidden = 2 * element * model.hidden_size * workload.tokens
    matrices = 3 if model.gated_mlp else 2
    widest = element * matrices * model.ffn_hidden_size / tp * workload.tokens
    layers = workload.stage_layers(stage)
    if layers and model.has_experts(layers[-1]):
        arrived = workload.shard_tokens * workload.routed_per_token
        gradients = (matrices * model.moe_ffn_hidden_size + model.hidden_size) * arrived
        sent = workload.shard_tokens * model.experts_per_token
        copies = model.hidden_size * (sent + (3 if workload.layout.ep > 1 else 2) * arrived)
        widest = element * max(gradients, copies)
    scores = 0.0
    if workload.attention == "unfused":
        scores = 2 * element * model.num_attention_heads / tp * workload.job.seq_length * workload.tokens
    return hidden + max(widest, scores)


def retained_input_gradients(workload: Workload, stage: int) -> float:
    """Bytes that layers with experts retain under full recompute: the gradient of each layer's input, until the layer's
    next forward.

    The dispatcher stores the router's probabilities as an attribute (moe/token_dispatcher.py, ``self.probs``). The
    recomputed probabilities keep their autograd graph alive. That graph ends in a detached copy of the layer's input
    (tensor_parallel/random.py, CheckpointFunction.backward), a leaf that keeps its gradient and shares the input's
    storage. Counted for all layers but the one in backward; layers of other chunks also retain their input.
    """
    if workload.layout.recompute != "full" or not workload.model.num_experts:
        return 0.0
    counts = [experts for _, experts in workload.stages.chunk_kinds[stage :: workload.layout.pp]]
    return (counts[0] - 1 + 2 * sum(counts[1:])) * layer_input(workload) if any(counts) else 0.0


def _beyond_the_first_layer(workload: Workload, stage: int, layer: float, retained: float) -> float:
    """For local layers: bytes by which the embedding's backward exceeds the first layer's backward (``layer`` bytes,
    freed by then). It has the gradients of the tables and of the embedding's output, and ``retained`` bytes."""
    tables = activations_megatron.table_gradients(workload, stage) if workload.implementation == "local" else 0.0
    return max(0.0, tables + retained + layer_input(workload) - layer) if tables else 0.0


def workspace_bytes(workload: Workload, stage: int) -> float:
    """Bytes of permanent workspaces.

    cuBLAS has its workspaces. Transformer Engine has one workspace of 32 MiB (4 MiB before Hopper), and four more for
    grouped GEMMs (cpp_extensions/gemm.py). Gradient accumulation fusion keeps one dummy gradient per shape of trained
    weights (get_dummy_wgrad); those of adapters are small. fp8 weights and their transposes are cached across micro
    batches (module/base.py, get_weight_workspace).
    """
    total = cublas_workspaces(workload.generation)
    if workload.implementation == "transformer_engine":
        own = 32 * MIB if workload.generation in LARGE_WORKSPACES else 4 * MIB
        total += own * (1 + (GROUPED_STREAMS if workload.model.num_experts and workload.grouped_gemm else 0))
    if workload.gradient_accumulation_fusion and workload.job.lora is None:
        total += activations_transformer_engine.ELEMENT * _distinct_weights(workload, stage)
    if workload.job.precision == "fp8" and workload.keeps_bf16_weights:
        parameters = workload.parameters[stage]
        total += 2.0 * (parameters.dense_matrices + parameters.experts)
    return total


def _distinct_weights(workload: Workload, stage: int) -> float:
    """Elements of one weight of every shape: one layer's dense matrices, one expert's, and the head's."""
    model, layout = workload.model, workload.layout
    matrices = workload.dense_layer_matrices
    if model.num_experts:
        matrices += (3 if model.gated_mlp else 2) * model.hidden_size * model.moe_ffn_hidden_size / layout.etp
    table = -(-model.vocab_size // layout.tp) * model.hidden_size if stage == layout.pp - 1 else 0
    return matrices + table
