"""Memory of a Megatron rank, beside its states: what layers keep, the loss, workspaces."""

from __future__ import annotations

from kit.cost.memory import activations_megatron
from kit.cost.memory.activations_transformer_engine import ELEMENT, kept_terms, layer_input, layer_terms
from kit.cost.memory.phases import LARGE_WORKSPACES, MIB, RankParts, cublas_workspaces
from kit.cost.memory.rank_states import EngineMemory, RankStates
from kit.cost.setup import TrainingSetup
from kit.cost.stages import chunks, chunks_in_flight, kinds, layers_on_stage, stage_kinds

GROUPED_STREAMS = 4
"""Streams of a grouped GEMM, each with a workspace (transformer_engine, num_cublas_streams)."""

DEFERRED_GRADIENTS = 2
"""Micro batches whose head gradients may wait: ``--wgrad-deferral-limit`` as Megatron-LM's own test of it sets it."""


def rank_parts(setup: TrainingSetup, engine: EngineMemory, states: RankStates, stage: int) -> RankParts:
    """Memory of a rank of one pipeline stage in parts."""
    # The layer whose backward runs is computed again, or fetched from the host.
    again = 0.0
    if setup.recompute == "full" or setup.activation_offload:
        dense, experts = stage_kinds(setup, stage)
        present = [kind for kind, count in ((False, dense), (True, experts)) if count]
        deepest = max((sum(layer_terms(setup, kind).values()) for kind in present), default=0.0)
        again = deepest * setup.recompute_every
    waiting, loss = logits_bytes(setup) if stage == setup.pp - 1 else (0.0, 0.0)
    kept = kept_activations(setup, stage)
    # Those of all layers are there when the first layer's backward runs, long after that of the final norm.
    after_layers = _after_last_layer(setup) if stage == setup.pp - 1 else 0.0
    outlived = outlived_gradients(setup, stage)
    working = working_bytes(setup, stage) + max(0.0, outlived - after_layers)
    return RankParts(
        states=states,
        buffers=workspace_bytes(setup, stage) + engine.buffers,
        gathered_in_loss=engine.gathered[0],
        gathered=engine.gathered[1],
        gathered_at_end=engine.gathered[2],
        kept=kept,
        again=again,
        working=working,
        waiting=waiting,
        loss=loss,
        after_backward=_beyond_the_first_layer(setup, stage, again + working, outlived + kept if outlived else 0.0),
        # An export gathers a parameter's shards in fp32, and joins them
        # (kit/engines/megatron/resharding/huggingface.py).
        save=(8.0 if setup.tp > 1 else 4.0) * engine.largest_parameter,
    )


def _beyond_the_first_layer(setup: TrainingSetup, stage: int, layer: float, outlived: float) -> float:
    """local: what the embedding's backward holds beyond what that of the first layer (``layer``) did, which has
    gone by then: gradients of tables and of the embedding's output, and whatever outlives its layer."""
    tables = activations_megatron.table_gradients(setup, stage) if setup.kernels == "local" else 0.0
    if not tables:
        return 0.0
    return max(0.0, tables + outlived + layer_input(setup) - layer)


def kept_activations(setup: TrainingSetup, stage: int) -> float:
    """Saved for backward of all micro batches in flight."""
    total = 0.0
    kept: dict[bool, float] = {}
    output = layer_input(setup) if setup.keeps_outputs else 0.0
    for virtual, (layers, count) in enumerate(zip(chunks(setup, stage), chunks_in_flight(setup, stage), strict=True)):
        one = _chunk_kept(setup, layers, kept)
        if stage == 0 and virtual == 0 and setup.shape.hidden_dropout:
            one += setup.shape.hidden_size * setup.shard_tokens
        if stage == setup.pp - 1 and virtual == setup.vp - 1:
            one += _after_last_layer(setup)
        else:
            one += output
        total += one * count
    return total


def _after_last_layer(setup: TrainingSetup) -> float:
    """Final norm, and the layers of multi-token prediction with their norms and projection."""
    hidden = setup.element * setup.shape.hidden_size * setup.shard_tokens
    final = 2 * hidden
    per_mtp = _layer_kept(setup, bool(setup.shape.expert_layers) and setup.shape.expert_layers[-1]) + 6 * hidden
    return final + setup.shape.mtp_layers * per_mtp


def _chunk_kept(setup: TrainingSetup, layers: tuple[int, ...], kept: dict[bool, float]) -> float:
    """Inputs of recomputed layers, the whole of the others (megatron-core, transformer/transformer_block.py).

    ``kept``: what one layer keeps, by whether it has experts, as far as it is known; filled in.
    """
    if setup.recompute != "full":
        total = 0.0
        for kind, count in enumerate(kinds(setup.shape, layers)):
            if count:
                if bool(kind) not in kept:
                    kept[bool(kind)] = _layer_kept(setup, bool(kind))
                total += count * kept[bool(kind)]
        return total
    again = len(layers) if setup.recompute_layers is None else min(setup.recompute_layers, len(layers))
    inputs = -(-again // setup.recompute_every)
    whole = sum(sum(layer_terms(setup, _expert(setup, layer)).values()) for layer in layers[again:])
    return inputs * layer_input(setup) + whole


def _layer_kept(setup: TrainingSetup, has_experts: bool) -> float:
    if setup.recompute == "full":
        return layer_input(setup)
    terms = kept_terms(setup, has_experts)
    if setup.activation_offload:
        # Fine-grained offload sends what modules keep to the host; inputs of dense MLPs and router stay.
        terms = {name: size for name, size in terms.items() if name in ("dropout", "router", "mlp", "shared_experts")}
    return sum(terms.values())


def _expert(setup: TrainingSetup, layer: int) -> bool:
    return bool(setup.shape.expert_layers) and setup.shape.expert_layers[layer]


def logits_bytes(setup: TrainingSetup) -> tuple[float, float]:
    """(kept since the losses of multi-token prediction, at the fullest moment of the last loss).

    unfused: 16-bit logits and one fp32 copy, in place (tensor_parallel/cross_entropy.py). native: the
    same code compiled (fusions/fused_cross_entropy.py); measured, one fp32 copy more: compiled, the subtraction is not
    in place. te: gradients overwrite the 16-bit
    logits (transformer_engine/pytorch/triton/cross_entropy.py).
    """
    entries = -(-setup.shape.vocab_size // setup.tp) * setup.tokens
    if setup.defer_embedding_gradient:
        # Logits' gradients and the head's inputs wait for the end (tensor_parallel/layers.py, wgrad_deferral_limit).
        waiting = min(setup.micro_batches - 1, DEFERRED_GRADIENTS)
        hidden = ELEMENT * setup.shape.hidden_size * setup.tokens
        return waiting * (2 * entries + hidden), 6 * entries
    if setup.kernels == "local":
        return 0.0, activations_megatron.local_loss_bytes(setup, entries)
    if setup.weight_bytes == 4:
        return 4 * entries * setup.shape.mtp_layers, 4 * entries  # fp32 already: in place throughout
    kept, fullest = {"unfused": (4, 6), "native": (4, 10), "te": (2, 2)}[setup.cross_entropy]
    return kept * entries * setup.shape.mtp_layers, fullest * entries


def working_bytes(setup: TrainingSetup, stage: int) -> float:
    """Gradients that exist at once in the backward of the last layer: of two widths of the MLP, or of the scores."""
    if setup.kernels == "local":
        return activations_megatron.backward_workspace_bytes(setup, stage_kinds(setup, stage)[1] > 0)
    shape = setup.shape
    element = setup.element
    hidden = 2 * element * shape.hidden_size * setup.tokens
    layers = layers_on_stage(setup, stage)
    widest = element * (3 if shape.gated_mlp else 2) * shape.ffn_hidden_size / setup.tp * setup.tokens
    if layers and _expert(setup, layers[-1]) and shape.experts:
        gate = 3 if shape.gated_mlp else 2
        moe = shape.experts
        arrived = setup.shard_tokens * moe.experts_per_token
        widest = element * (gate * moe.ffn_hidden_size + shape.hidden_size) * arrived
    scores = 0.0
    if setup.attention == "unfused":
        scores = 2 * element * shape.num_attention_heads / setup.tp * setup.seq_length * setup.tokens
    return hidden + max(widest, scores)


def outlived_gradients(setup: TrainingSetup, stage: int) -> float:
    """Under full recompute a layer with experts holds its input's gradient until its next forward.

    The dispatcher keeps the router's probabilities as an attribute (moe/token_dispatcher.py, ``self.probs``). Computed
    again, they have a graph; that ends in the leaf which stands for the layer's input (tensor_parallel/random.py,
    CheckpointFunction.backward), and a leaf keeps its gradient, and the layer's input, whose storage it shares.
    All layers but the one whose backward runs; of other chunks' layers also the input, which nothing else keeps.
    """
    if setup.recompute != "full" or setup.shape.experts is None:
        return 0.0
    counts = [kinds(setup.shape, layers)[1] for layers in chunks(setup, stage)]
    if not any(counts):
        return 0.0
    return (counts[0] - 1 + 2 * sum(counts[1:])) * layer_input(setup)


def workspace_bytes(setup: TrainingSetup, stage: int) -> float:
    """What stays allocated beside the states.

    cuBLAS's workspaces. One of Transformer Engine, 32 MiB or on Ampere 4, and four more for grouped products
    (cpp_extensions/gemm.py).
    megatron-core without it keeps a buffer of scores (transformer/dot_product_attention.py, ``mpu``). With fused
    accumulation a dummy gradient of each weight's shape stays (get_dummy_wgrad). fp8 weights and their transposes are
    cached across micro batches (module/base.py, get_weight_workspace).
    """
    total = cublas_workspaces(setup.gpu_generation, setup.deterministic)
    if setup.kernels == "transformer_engine":
        own = 32 * MIB if setup.gpu_generation in LARGE_WORKSPACES else 4 * MIB
        grouped = setup.shape.experts is not None and setup.shape.experts.grouped_gemm
        total += own * (1 + (GROUPED_STREAMS if grouped else 0))
    elif setup.attention == "unfused" and setup.kernels != "local":
        total += ELEMENT * setup.shape.num_attention_heads / setup.tp * setup.seq_length * setup.tokens
    if setup.gradient_accumulation_fusion:
        total += ELEMENT * _distinct_weights(setup, stage)
    if setup.fp8 and setup.fp8.keeps_bf16_weights:
        held = setup.parameters[stage]
        total += 2.0 * (held.dense_matrices + held.experts)
    return total


def _distinct_weights(setup: TrainingSetup, stage: int) -> float:
    """Elements of one weight of every shape: one layer's dense matrices, one expert's, and the head's."""
    shape = setup.shape
    matrices = setup.dense_layer_matrices
    if shape.experts is not None:
        moe = shape.experts
        matrices += (3 if shape.gated_mlp else 2) * shape.hidden_size * moe.ffn_hidden_size / setup.etp
    table = -(-shape.vocab_size // setup.tp) * shape.hidden_size if stage == setup.pp - 1 else 0
    return matrices + table
