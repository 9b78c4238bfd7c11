"""Seconds of one transformer layer on one rank: GEMMs, attention, element-wise operators, kernel launches.

Forward and backward are counted apart. Backward has two GEMMs for each of forward's (gradients of the input and of the
weight, the latter summed into memory), attention's five instead of two (FlashAttention-2, arXiv 2307.08691, section 4),
and reads and writes about twice as much in element-wise operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kit.cost.collectives import group
from kit.cost.hardware import GemmPerf, GpuPerf, matmul_s
from kit.cost.model.flops import layer_attention_flops_per_token
from kit.cost.model.params import count
from kit.cost.time import elementwise
from kit.cost.workload import Workload
from kit.specs.job import GrpoSpec

Gemm = tuple[float, float, float, float]
"""(rows, columns, inner, count) of a forward GEMM."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one micro batch on a rank."""

    forward: float
    """Busy time of the GPU."""
    backward: float
    recompute: float
    """Forward operators that are recomputed in backward."""
    gemms_forward: float
    """Part of ``forward`` that collectives can overlap."""
    gemms_backward: float
    attention_forward: float
    launch_forward: float
    """Host time to launch the kernels; the GPU waits if this is longer than its own time."""
    launch_backward: float


def layer_time(gpu: GpuPerf, workload: Workload, has_experts: bool) -> LayerTime:
    """Times of a layer with or without experts."""
    model = workload.model
    mlp = mlp_gemms(workload, model.shared_ffn_hidden_size if has_experts else model.ffn_hidden_size)
    parts = [gemms_s(gpu.matmul, workload, attention_gemms(workload)), gemms_s(gpu.matmul, workload, mlp)]
    if has_experts:
        parts.append(gemms_s(gpu.others, workload, expert_gemms(workload)))
    gemms_forward, gemms_backward = map(sum, zip(*parts, strict=True))
    branches = branches_s(gpu, workload)
    attention = attention_forward_s(gpu, workload)
    elements = elementwise.layer_elementwise_bytes(workload, has_experts) / gpu.bytes_per_s
    attention_backward = 2.5 * attention if workload.execution.attention != "unfused" else 2.0 * attention
    launch = elementwise.layer_kernels(workload, has_experts) * gpu.rates.kernel_launch_us * 1e-6
    recompute = 0.0
    if workload.layout.recompute == "full":
        recompute = (gemms_forward + attention + elements + branches[0]) * workload.recomputed_share
    elif modules := workload.recompute_modules:
        whole = ("moe" if has_experts else "mlp") in modules
        recompute = attention if "core_attn" in modules else 0.0
        recompute += elementwise.recomputed_bytes(workload, has_experts) / gpu.bytes_per_s
        recompute += sum(part[0] for part in parts[1:]) if whole else 0.0
    elif workload.recomputes_by_operator:
        sizes = [out * width for out, width in workload.products]
        recompute = gemms_forward * sum(sizes[1::2]) / sum(sizes) + elements
    if workload.layout.tiled_mlp:
        # Each tile is computed again in backward, after full recompute has computed all of them for nothing.
        recompute += parts[1][0] + elementwise.activation_bytes(workload, model.ffn_hidden_size) / gpu.bytes_per_s
    return LayerTime(
        forward=gemms_forward + attention + elements + branches[0],
        backward=gemms_backward + attention_backward + 2 * elements + branches[1],
        recompute=recompute,
        gemms_forward=gemms_forward,
        gemms_backward=gemms_backward,
        attention_forward=attention,
        launch_forward=launch,
        launch_backward=elementwise.BACKWARD_LAUNCHES * launch,
    )


def branches_s(gpu: GpuPerf, workload: Workload) -> tuple[float, float]:
    """(forward, backward) seconds that adapters and 4-bit weights add to the mean layer. A branch's GEMMs are as narrow
    as its rank, so that memory decides their time; more is moved by the operators around them."""
    lora, model, tp, tokens = workload.job.lora, workload.model, workload.layout.tp, workload.tokens
    if lora is None:
        return 0.0, 0.0
    moved = elementwise.branch_of(workload)
    forward, backward = (dequantised / gpu.bytes_per_s for dequantised in elementwise.dequantised_bytes(workload))
    for layer in workload.adapted:
        rank, share = lora.rank_of(layer.name), layer.number / model.num_layers
        inputs, outputs = layer.widths(tp)
        there, back = _gemms_s(gpu.others, ((tokens, rank, inputs, 1.0), (tokens, outputs, rank, 1.0)), 2.0)
        elements = tokens / gpu.bytes_per_s
        forward += share * (there + (moved.inputs * inputs + moved.outputs * outputs) * elements)
        backward += share * (back + (moved.inputs_back * inputs + moved.outputs_back * outputs) * elements)
    return forward, backward


def head_s(gpu: GpuPerf, workload: Workload) -> tuple[float, float]:
    """(forward, backward) of the output projection and the loss, on the last stage."""
    tokens = workload.tokens
    gemm = (tokens, workload.model.vocab_size / workload.layout.tp, workload.model.hidden_size, 1.0)
    loss = tokens * elementwise.loss_elementwise_bytes(workload) / gpu.bytes_per_s
    forward, backward = gemms_s(gpu.others, workload, [gemm])
    return forward + loss / 2, backward + loss / 2


def embedding_s(gpu: GpuPerf, workload: Workload) -> float:
    """Seconds of the embedding's look-up and of the scatter of its gradient."""
    return 12.0 * workload.shard_tokens * workload.model.hidden_size / gpu.bytes_per_s


def attention_forward_s(gpu: GpuPerf, workload: Workload) -> float:
    """Seconds of attention in forward. Fused kernels compute half of the scores, and blocks on the diagonal in full.

    Unfused attention computes every score, and softmax and dropout read and write all scores.
    """
    model, layout, s = workload.model, workload.layout, workload.job.seq_length
    heads = model.num_attention_heads / layout.tp
    query, value = model.head_dim, model.value_width / model.num_attention_heads
    if workload.execution.attention == "unfused":
        count = heads * workload.sequences / layout.cp
        element = elementwise.element_bytes(workload)
        gemms = matmul_s(gpu.matmul, s, s, query, count, element) + matmul_s(gpu.matmul, s, value, s, count, element)
        return gemms + elementwise.SCORE_PASSES * element * count * s * s / gpu.bytes_per_s
    if model.approximate is not None:
        rate = gpu.attention_flops_per_s * s / (s + elementwise.ATTENTION_RAMP)
        return workload.tokens * layer_attention_flops_per_token(model, s) / rate
    # A window shortens attention only if every layer has it; if some layers see everything, all count as full.
    window = model.sliding_window if model.full_attention_every == 0 else None
    seen = s / 2 if window is None or window >= s else window - window**2 / (2 * s)
    seen += elementwise.ATTENTION_BLOCK / 2
    flops = 2.0 * heads * workload.sequences * s * seen / layout.cp * (query + value)
    # Few blocks of queries leave multiprocessors idle.
    ramp = s / (s + elementwise.ATTENTION_RAMP)
    # Without the zig-zag order the last context-parallel rank attends to the whole sequence, and the others wait.
    uneven = 1.0 if workload.execution.balanced_context else 2.0 - 1.0 / layout.cp
    return uneven * flops / (gpu.attention_flops_per_s * ramp)


def attention_gemms(workload: Workload) -> list[Gemm]:
    """Forward GEMMs of attention's projections; for latent attention the down-projection first, the output last."""
    model, tp, tokens = workload.model, workload.layout.tp, workload.tokens
    h, latent = model.hidden_size, model.latent
    if model.approximate is not None:  # all matrices but those of experts, as one that widens and one that narrows
        width = count(model).layer.attention / (2 * h)
        return [(tokens, width, h, 1.0), (tokens, h, width, 1.0)]
    out = (tokens, h, model.value_width / tp, 1.0)
    if latent is None:
        key_value = max(model.key_value_width / tp, model.head_dim)
        return [(tokens, model.query_width / tp + 2 * key_value, h, 1.0), out]
    up = model.num_attention_heads * (latent.nope_head_dim + latent.value_head_dim) / tp
    gemms = [
        (workload.shard_tokens, latent.kv_lora_rank + latent.rope_head_dim, h, 1.0),
        (tokens, up, latent.kv_lora_rank, 1.0),
    ]
    if latent.q_lora_rank is None:
        return [*gemms, (tokens, model.query_width / tp, h, 1.0), out]
    compressed = (workload.shard_tokens, latent.q_lora_rank, h, 1.0)
    return [*gemms, compressed, (tokens, model.query_width / tp, latent.q_lora_rank, 1.0), out]


def mlp_gemms(workload: Workload, width: int) -> list[Gemm]:
    """The two forward GEMMs of an MLP (gate and up are one). None for width 0, nor for an approximate model, whose
    matrices are in ``attention_gemms``."""
    if not width or workload.model.approximate is not None:
        return []
    model, tp, tokens = workload.model, workload.layout.tp, workload.tokens
    up = (2 if model.gated_mlp else 1) * width / tp
    return [(tokens, up, model.hidden_size, 1.0), (tokens, model.hidden_size, width / tp, 1.0)]


def expert_gemms(workload: Workload) -> list[Gemm]:
    """Forward GEMMs of router and experts on the fullest rank."""
    model, layout, h = workload.model, workload.layout, workload.model.hidden_size
    local = model.num_experts / layout.ep
    own = workload.tokens / layout.tp
    rows = own * workload.routed_per_token * layout.etp / local * workload.capacity_factor
    width = model.moe_ffn_hidden_size / layout.etp
    return [
        (own, float(model.num_experts), h, 1.0),
        (rows, (2 if model.gated_mlp else 1) * width, h, local),
        (rows, h, width, local),
    ]


def gemms_s(rates: GemmPerf, workload: Workload, gemms: list[Gemm]) -> tuple[float, float]:
    """(forward, backward) seconds of GEMMs. Frozen weights have no gradient; adapters have ``branches_s``."""
    fused = workload.gradient_accumulation_fusion
    summed = 2.0 * workload.main_gradient_bytes if fused else 2.0
    return _gemms_s(rates, tuple(gemms), None if workload.job.lora is not None else summed)


@lru_cache(maxsize=4096)  # most layouts of a search share theirs
def _gemms_s(rates: GemmPerf, gemms: tuple[Gemm, ...], summed: float | None) -> tuple[float, float]:
    """``summed``: bytes per weight gradient to add it up; None if there are none."""
    forward = backward = 0.0
    for rows, columns, inner, number in gemms:
        forward += matmul_s(rates, rows, columns, inner, number)
        backward += matmul_s(rates, rows, inner, columns, number)
        if summed is not None:
            backward += matmul_s(rates, columns, inner, rows, number, output_bytes=summed)
    return forward, backward


def generation_s(gpu: GpuPerf, workload: Workload) -> float:
    """Seconds to generate a rank's completions of the whole step, all at once.

    Each token reads all weights, and the keys and values so far. transformers also waits for the host to launch each
    layer's kernels; under FSDP2 every token gathers the weights, at ZeRO-3 the whole generation does once. Rows end
    together here: completions that end earlier save less than their share.
    """
    model, layout, grpo = workload.model, workload.layout, workload.job.grpo or GrpoSpec()
    rows, counts = workload.completions, count(model)
    tokens = min(grpo.max_completion_length, workload.job.seq_length)
    prompt = workload.job.seq_length - tokens
    flops = 2.0 * rows * (counts.active_matrices + model.vocab_size * model.hidden_size) / gpu.matmul.flops_per_s
    cached = rows * workload.cached_bytes_per_token * (prompt + tokens / 2)
    token = max((2.0 * counts.total + cached) / gpu.bytes_per_s, flops)
    ranks, once = group(workload.cluster, layout.dp, 1), 0.0
    if not workload.vllm_share:
        kernels = model.num_layers * elementwise.layer_kernels(workload, model.num_experts > 0)
        token = max(token, kernels * gpu.rates.kernel_launch_us * 1e-6)
        gather = ranks.all_gather_s(workload.element * counts.total, model.num_layers) if ranks.size > 1 else 0.0
        sharded = layout.zero_stage >= (2 if layout.engine == "torch" else 3)
        token += gather if sharded and layout.engine == "torch" else 0.0
        once = gather if sharded and layout.engine == "deepspeed" else 0.0
    return once + prompt * flops + tokens * token
