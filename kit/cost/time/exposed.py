"""Exposed seconds of collectives, the time that no compute hides: of a layer split over ranks, and of replicas."""

from __future__ import annotations

from typing import NamedTuple

from kit.cost.collectives import (
    DEQUANTISE_BYTES,
    INT4_BYTES,
    INT8_BYTES,
    QUANTISE_GRADIENT_BYTES,
    Group,
    ZeroPlusPlus,
    gradient_bytes,
    group,
    kernel_bytes,
)
from kit.cost.hardware import GpuPerf, shared
from kit.cost.memory.deepspeed_sizes import live_parameters
from kit.cost.model.params import RankParameters, count
from kit.cost.workload import Workload
from kit.specs.job import MLP_LAYERS


def exposed(seconds: float, window: float) -> float:
    """Seconds of a collective that compute of ``window`` seconds cannot hide. A share of it is never hidden, because
    the collective starts before there is compute."""
    return max(seconds - shared().overlap * window, shared().unhidden * seconds)


# ---------------------------------------------------------------- a layer


class Exposed(NamedTuple):
    """Exposed seconds of a layer's collectives for one micro batch: the time that no compute hides."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.recompute


def _both_ways(workload: Workload, forward: float, backward: float, of_modules: float = 0.0) -> Exposed:
    """Adds the recomputation's collectives: under full recompute, those of forward; ``of_modules``: those of the
    modules that selective recompute computes again."""
    return Exposed(forward, backward, forward if workload.layout.recompute == "full" else of_modules)


def tensor_parallel(workload: Workload, gemms_forward: float, gemms_backward: float, experts: bool) -> Exposed:
    """Two all-reduces a layer forward, two backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    Sequence parallelism replaces each by a reduce-scatter and an all-gather of the same volume. Backward needs one more
    all-gather, for inputs that were saved sharded (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2). A layer
    with experts has only the collectives of attention. ``gemms_forward``, ``gemms_backward``: seconds of its GEMMs.
    """
    layout, how = workload.layout, workload.execution
    if layout.tp == 1:
        return Exposed()
    ranks = group(workload.cluster, layout.tp, 1)
    size = workload.tokens * workload.model.hidden_size * 2.0
    blocks = 1 if experts else 2
    one_way = blocks * ranks.all_reduce_s(size)
    if workload.job.lora is not None:  # between A and B, over one or three ranks (engines/megatron/adapters.py)
        adapted = blocks if MLP_LAYERS & workload.job.lora.layers else 1
        one_way += adapted * ranks.all_reduce_s(workload.tokens * 2 * workload.job.lora.rank * 2.0)
    regathered = blocks * ranks.all_gather_s(size) if layout.sp else 0.0
    forward = exposed(one_way, gemms_forward if how.overlaps_tensor_parallel else 0.0)
    backward = exposed(one_way + regathered, gemms_backward if how.overlaps_tensor_gradients else 0.0)
    of_mlp = 0.0 if experts or "mlp" not in workload.recompute_modules else forward / blocks
    return _both_ways(workload, forward, backward, of_mlp)


def context_parallel(workload: Workload, attention_forward: float) -> Exposed:
    """Exposed seconds of context parallelism. p2p: a ring sends keys and values while attention computes. all_gather:
    keys and values are gathered before attention. a2a: all-to-alls trade the sequence split for a split of heads
    (DeepSpeed-Ulysses, arXiv 2309.14509). ``attention_forward``: seconds of attention in forward."""
    model, layout = workload.model, workload.layout
    if layout.cp == 1:
        return Exposed()
    ranks = group(workload.cluster, layout.cp, layout.tp)
    width = (model.query_width + model.value_width if model.latent else 2 * model.key_value_width) / layout.tp
    sequence = layout.micro_batch_size * workload.job.seq_length * 2.0
    if layout.cp_comm_type == "a2a":
        exchanged = (model.query_width + model.value_width) / layout.tp + width
        one_way = ranks.all_to_all_s(sequence / layout.cp * exchanged)
        return _both_ways(workload, one_way, one_way)
    one_way = ranks.all_gather_s(sequence * width)
    if layout.cp_comm_type == "all_gather":
        return _both_ways(workload, one_way, one_way)
    # Backward sends keys and values again, and their gradients.
    back = exposed(2 * one_way, 2.5 * attention_forward)
    return _both_ways(workload, exposed(one_way, attention_forward), back)


def expert_parallel(workload: Workload, forward: float, backward: float) -> Exposed:
    """Exposed seconds of expert parallelism: two all-to-alls per layer (dispatch and combine), in forward and again in
    backward (megatron-core, moe/token_dispatcher.py).

    With tensor parallelism inside experts, its ranks also all-gather tokens and reduce-scatter outputs. ``forward``,
    ``backward``: seconds of the compute that can run meanwhile, where anything can.
    """
    layout, experts_per_token = workload.layout, workload.routed_per_token
    sent = workload.tokens / layout.tp * workload.model.hidden_size * 2.0
    one_way = _dispatch_s(workload, group(workload.cluster, layout.ep, layout.etp), sent)
    one_way += group(workload.cluster, layout.etp, 1).all_gather_s(sent * experts_per_token * layout.etp)
    both = 2 * one_way
    repeated = both if layout.recompute == "full" or "moe" in workload.recompute_modules else 0.0
    if not workload.execution.overlaps_experts:
        return Exposed(both, both, repeated)
    return Exposed(exposed(both, forward), exposed(both, backward), repeated)


def _dispatch_s(workload: Workload, ranks: Group, token_bytes: float) -> float:
    """Seconds of one all-to-all that sends each token to its experts. ``token_bytes``: bytes of a rank's tokens.

    DeepEP and HybridEP send a token once to each other node, and from there once to each rank, that has one of its
    experts (deepseek-ai/DeepEP, csrc/kernels/legacy/internode.cu, is_token_in_rank; of one node alone, the latter).
    """
    experts_per_token = workload.routed_per_token  # the others wait for the rank that receives the most
    if ranks.size == 1:
        return 0.0
    if not workload.execution.once_per_node:
        return ranks.all_to_all_s(token_bytes * experts_per_token)
    chosen = workload.model.experts_per_token

    def sent(places: int) -> float:
        return (places - 1) * (1 - (1 - 1 / places) ** chosen) * experts_per_token / chosen * token_bytes

    across = sent(ranks.nodes) / ranks.port_bytes_per_s if ranks.nodes > 1 else 0.0
    return max(across, sent(ranks.size) / ranks.inner_bytes_per_s) + ranks.latency_s


# ---------------------------------------------------------------- replicas


def data_parallel_s(
    gpu: GpuPerf, workload: Workload, parameters: RankParameters, forward: float, backward: float
) -> float:
    """Exposed seconds of a step. ``forward`` and ``backward``: compute seconds of one micro batch on a rank."""
    layout, how = workload.layout, workload.execution
    ranks = group(workload.cluster, layout.dense_dp, layout.tp)
    expert_ranks = group(workload.cluster, layout.expert_dp, layout.ep * layout.etp)
    if ranks.size == 1 and expert_ranks.size == 1:
        return 0.0
    if layout.zero_stage == 3 or (layout.zero_stage == 2 and how.engine == "fsdp"):
        return _fully_sharded(gpu, workload, parameters, ranks, expert_ranks, forward, backward)
    trained = workload.trained_share(parameters)
    reduced = trained * _gather_s(ranks, expert_ranks, parameters, _sent_bytes(workload))
    weights = trained * _gather_s(ranks, expert_ranks, parameters, 2.0 if how.precision != "fp32" else 4.0)
    if how.engine == "deepspeed":
        return _deepspeed(workload, reduced, weights, backward)
    reduction = reduced * (1 if layout.zero_stage == 1 and not how.reduces_in_full else 2)
    gathered = weights if layout.zero_stage == 1 else 0.0
    compressed = kernel_bytes(layout.gradient_compression) * (parameters.dense + parameters.experts) / gpu.bytes_per_s
    if not how.overlaps_gradients:
        return reduction + gathered + compressed
    return exposed(reduction, backward) + exposed(gathered, forward) + compressed


def _sent_bytes(workload: Workload) -> float:
    """Bytes sent per gradient, with what compresses it."""
    model, kind = workload.model, workload.layout.gradient_compression
    return gradient_bytes(model, kind, workload.execution.gradient_bytes, count(model).total)


def _gather_s(ranks: Group, expert_ranks: Group, parameters: RankParameters, width: float, messages: int = 1) -> float:
    """Seconds of an all-gather, or equally a reduce-scatter, of ``parameters`` with ``width`` bytes each."""
    dense = ranks.all_gather_s(width * parameters.dense, messages)
    return dense + (expert_ranks.all_gather_s(width * parameters.experts, messages) if parameters.experts else 0.0)


def _fully_sharded(
    gpu: GpuPerf,
    workload: Workload,
    parameters: RankParameters,
    ranks: Group,
    experts: Group,
    forward: float,
    backward: float,
) -> float:
    """Exposed seconds of FSDP and ZeRO-3. Each layer's all-gather overlaps the compute of the layer before: in forward,
    and again in backward if weights are resharded after forward. Gradients are reduce-scattered in every micro batch,
    in fp32 under FSDP2."""
    layout, how = workload.layout, workload.execution
    # In a pipeline weights are gathered, and sums of gradients scattered, once a step (arXiv 2407.21783, 3.3.2).
    m = layout.gradient_accumulation_steps if layout.pp == 1 or layout.zero_stage == 3 else 1
    messages, width = _gathers(workload)
    gather = first = _gather_s(ranks, experts, parameters, width, messages)
    scatter = _gather_s(ranks, experts, parameters, _sent_bytes(workload), messages)
    if (chosen := ZeroPlusPlus.of(layout)) is not None:
        elements = parameters.dense + parameters.experts
        first, gather, scatter = zero_times(gpu, chosen, ranks.size, elements, width, messages)
    if how.engine == "deepspeed" and not how.deepcompile:
        scatter += STAGE3_COPIES * parameters.total / gpu.bytes_per_s
    gathers = (1.0 if layout.zero_stage == 3 else 0.0) + gathered_again(workload, parameters)
    back = gathers * gather + workload.trained_share(parameters) * scatter
    unhidden = how.unhidden_sharding
    forwards = [max(exposed(each, forward), unhidden * each) for each in (first, gather)]
    return forwards[0] + (m - 1) * forwards[1] + m * max(exposed(back, backward), unhidden * back)


def _gathers(workload: Workload) -> tuple[int, float]:
    """(messages, bytes per parameter) of a gather of all weights. DeepSpeed gathers each linear layer separately; it
    does not shard smaller parameters."""
    how = workload.execution
    messages = workload.num_layers * ((7 if workload.model.gated_mlp else 4) if how.engine == "deepspeed" else 1)
    width = 2.0 if workload.keeps_bf16_weights else 1.0
    return messages, 4.0 if how.precision == "fp32" else width


def forward_gather_s(workload: Workload, parameters: RankParameters, forward: float) -> float:
    """Exposed seconds of the gathers of one forward without gradient; 0 unless weights are sharded. ``forward``: its
    compute seconds."""
    layout, how = workload.layout, workload.execution
    ranks = group(workload.cluster, layout.dense_dp, layout.tp)
    if ranks.size == 1 or not (layout.zero_stage == 3 or (layout.zero_stage == 2 and how.engine == "fsdp")):
        return 0.0
    expert_ranks = group(workload.cluster, layout.expert_dp, layout.ep * layout.etp)
    messages, width = _gathers(workload)
    gather = _gather_s(ranks, expert_ranks, parameters, width, messages)
    return max(exposed(gather, forward), how.unhidden_sharding * gather)


STAGE3_COPIES = 12.0
"""Memory traffic of ZeRO-3 per gradient, bytes: copy into the bucket (4), split into the ranks' shards (4), divide (4)
(DeepSpeed, runtime/zero/stage3.py and runtime/comm/coalesced_collectives.py)."""


def gathered_again(workload: Workload, parameters: RankParameters) -> float:
    """Share of the weights that ZeRO-3 gathers a third time. Full recompute runs a layer's forward again before its
    backward. DeepSpeed keeps a weight between the two if its next use is within the reuse distance
    (partitioned_param_coordinator.py). For the first weight of a layer, that distance is two layers."""
    layout, how = workload.layout, workload.execution
    if how.engine != "deepspeed" or how.deepcompile or layout.recompute != "full":
        return 0.0
    kept = how.reuse_distance or layout.stage3_max_live_parameters or live_parameters(workload.model, workload.cluster)
    return max(0.0, 1 - kept / (2 * parameters.total / workload.num_layers))


def _deepspeed(workload: Workload, reduced: float, gathered: float, backward: float) -> float:
    """Exposed seconds of DeepSpeed's stages 0 to 2. All three all-reduce gradients; stages 1 and 2 then keep only their
    shard (runtime/zero/stage_1_and_2.py, allreduce_and_scatter). Stage 2 reduces in each micro batch, stages 0 and 1
    after the last. Stages 1 and 2 gather the weights after the step, where no compute hides the gather."""
    stage, m = workload.layout.zero_stage, workload.layout.gradient_accumulation_steps
    reduced *= 2
    hidden = exposed(reduced, backward) if workload.execution.overlaps_gradients else reduced
    if stage == 2:
        return m * hidden + gathered
    if stage == 1:
        return (hidden if m == 1 else reduced) + gathered
    return reduced


def zero_times(
    gpu: GpuPerf, chosen: ZeroPlusPlus, ranks: int, parameters: float, width: float, messages: int
) -> tuple[float, float, float]:
    """Seconds of ZeRO++'s collectives in one micro batch: (gather in the forward pass of a step's first micro batch,
    gather in every other pass, scatter). ``parameters``: elements of ``width`` bytes over ``ranks`` adjacent ranks, in
    ``messages`` collectives."""
    everywhere = group(gpu.cluster, ranks, 1)
    each = INT8_BYTES if chosen.weights else width
    kernels = DEQUANTISE_BYTES * parameters / gpu.bytes_per_s if chosen.weights else 0.0
    first = everywhere.all_gather_s(each * parameters, messages) + kernels
    near = group(gpu.cluster, chosen.hpz, 1) if chosen.hpz > 1 else everywhere
    gather = near.all_gather_s(each * parameters, messages) + kernels
    if not chosen.gradients:
        return first, gather, everywhere.all_gather_s(width * parameters, messages)
    node = gpu.cluster.gpus_per_node
    inside = group(gpu.cluster, min(node, ranks), 1).all_gather_s(INT4_BYTES * parameters, messages)
    between = group(gpu.cluster, max(1, ranks // node), node).all_gather_s(INT4_BYTES * parameters / node, messages)
    return first, gather, inside + between + QUANTISE_GRADIENT_BYTES * parameters / gpu.bytes_per_s
