"""Seconds of one transformer layer on one rank: GEMMs, attention, element-wise operators, kernel launches.

Forward and backward are counted apart. Backward has two products for each of forward's (gradients of the input and of
the weight, the latter summed into memory), attention's five instead of two (FlashAttention-2, arXiv 2307.08691,
section 4), and reads and writes about twice as much in element-wise operators.
"""

from __future__ import annotations

from dataclasses import dataclass

from kit.cost.setup import TrainingSetup
from kit.cost.time import elementwise
from kit.cost.time.gpu import Machine
from kit.cost.time.matmul import Processor, matmul_s

Product = tuple[float, float, float, float]
"""(rows, columns, inner, count) of a forward product."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer and micro batch on a rank."""

    forward: float
    """Busy time of the GPU."""
    backward: float
    again: float
    """Forward operators that backward computes once more."""
    products_forward: float
    """Part of ``forward`` beside which exchanges can run."""
    products_backward: float
    attention_forward: float
    launch_forward: float
    """The host's time to issue the kernels; the GPU waits for it where it is longer."""
    launch_backward: float


def layer_time(machine: Machine, setup: TrainingSetup, has_experts: bool) -> LayerTime:
    """Times of a layer with or without experts."""
    shape = setup.shape
    attention_products = _attention_products(setup)
    experts = _expert_products(setup) if has_experts else []
    mlp = _shared_products(setup) if has_experts else _mlp_products(setup, shape.ffn_hidden_size)
    products = [(machine.matmul, product) for product in attention_products]
    products += [(machine.others, product) for product in experts]
    products += [(machine.matmul, product) for product in mlp]
    forward_products = sum(_forward_s(*product) for product in products)
    backward_products = sum(_backward_s(processor, setup, product) for processor, product in products)
    attention = attention_forward_s(machine, setup)
    elements = elementwise.layer_traffic_bytes(setup, has_experts) / machine.bytes_per_s
    attention_backward = 2.5 * attention if setup.program.attention != "unfused" else 2.0 * attention
    kernels = elementwise.layer_kernels(setup, has_experts)
    launch = kernels * machine.rates.kernel_launch_us * 1e-6
    return LayerTime(
        forward=forward_products + attention + elements,
        backward=backward_products + attention_backward + 2 * elements,
        again=_again(setup, machine, has_experts, forward_products, attention, elements, experts + mlp),
        products_forward=forward_products,
        products_backward=backward_products,
        attention_forward=attention,
        launch_forward=launch,
        launch_backward=elementwise.BACKWARD_LAUNCHES * launch,
    )


def head_s(machine: Machine, setup: TrainingSetup) -> tuple[float, float]:
    """(forward, backward) of the output projection and the loss, on the last stage."""
    shape, tokens = setup.shape, setup.tokens
    product = (tokens, shape.vocab_size / setup.tp, shape.hidden_size, 1.0)
    loss = tokens * elementwise.loss_traffic_bytes(setup) / machine.bytes_per_s
    return _forward_s(machine.others, product) + loss / 2, _backward_s(machine.others, setup, product) + loss / 2


def embedding_s(machine: Machine, setup: TrainingSetup) -> float:
    """Look-up and its scattered gradient."""
    return 12.0 * setup.shard_tokens * setup.shape.hidden_size / machine.bytes_per_s


def attention_forward_s(machine: Machine, setup: TrainingSetup) -> float:
    """Scores and values. Fused kernels compute half of the scores, and the diagonal's blocks in full.

    Unfused, every score is computed, and softmax and dropout read and write all of them.
    """
    shape, s = setup.shape, setup.seq_length
    heads = shape.num_attention_heads / setup.tp
    sequences = setup.micro_batch_size
    widths = (shape.query_width + shape.value_width) / shape.num_attention_heads
    if setup.program.attention == "unfused":
        count = heads * sequences / setup.cp
        element = 4.0 if setup.program.precision == "fp32" else 2.0
        scores = matmul_s(machine.matmul, s, s, shape.query_width / shape.num_attention_heads, count, element)
        values = matmul_s(machine.matmul, s, shape.value_width / shape.num_attention_heads, s, count, element)
        return scores + values + elementwise.SCORE_PASSES * element * count * s * s / machine.bytes_per_s
    # Layers that see everything decide the slowest kernel; with a window on most, few of them do.
    window = shape.sliding_window if shape.full_attention_every == 0 else None
    seen = s / 2 if window is None or window >= s else window - window**2 / (2 * s)
    seen += elementwise.ATTENTION_BLOCK / 2
    flops = 2.0 * heads * sequences * s * seen / setup.cp * widths
    # Few blocks of queries leave multiprocessors idle.
    ramp = s / (s + elementwise.ATTENTION_RAMP)
    # Without the zig-zag order the last rank of a sequence sees all of it, and the others wait.
    uneven = 1.0 if setup.program.balanced_context else 2.0 - 1.0 / setup.cp
    return uneven * flops / (machine.attention_flops_per_s * ramp)


def _attention_products(setup: TrainingSetup) -> list[Product]:
    shape, tp, tokens = setup.shape, setup.tp, setup.tokens
    h = shape.hidden_size
    out = (tokens, h, shape.value_width / tp, 1.0)
    if shape.latent is None:
        key_value = max(shape.key_value_width / tp, shape.head_dim)
        return [(tokens, shape.query_width / tp + 2 * key_value, h, 1.0), out]
    latent = shape.latent
    up = shape.num_attention_heads * (latent.nope_head_dim + latent.value_head_dim) / tp
    products = [
        (setup.shard_tokens, latent.kv_lora_rank + latent.rope_head_dim, h, 1.0),
        (tokens, up, latent.kv_lora_rank, 1.0),
    ]
    if latent.q_lora_rank is None:
        products.append((tokens, shape.query_width / tp, h, 1.0))
    else:
        products += [
            (setup.shard_tokens, latent.q_lora_rank, h, 1.0),
            (tokens, shape.query_width / tp, latent.q_lora_rank, 1.0),
        ]
    return [*products, out]


def _mlp_products(setup: TrainingSetup, width: float) -> list[Product]:
    shape, tp, tokens = setup.shape, setup.tp, setup.tokens
    up = (2 if shape.gated_mlp else 1) * width / tp
    return [(tokens, up, shape.hidden_size, 1.0), (tokens, shape.hidden_size, width / tp, 1.0)]


def _expert_products(setup: TrainingSetup) -> list[Product]:
    """Even routing: each rank's experts get as many tokens as it has, times the experts of a token."""
    shape, moe = setup.shape, setup.shape.experts
    assert moe is not None
    local = moe.num_experts / setup.ep
    own = setup.tokens / setup.tp
    rows = own * moe.experts_per_token * setup.etp / local
    if moe.capacity_factor is not None:
        rows *= moe.capacity_factor
    width = moe.ffn_hidden_size / setup.etp
    h = shape.hidden_size
    return [
        (own, float(moe.num_experts), h, 1.0),
        (rows, (2 if shape.gated_mlp else 1) * width, h, local),
        (rows, h, width, local),
    ]


def _shared_products(setup: TrainingSetup) -> list[Product]:
    moe = setup.shape.experts
    assert moe is not None
    return _mlp_products(setup, moe.shared_ffn_hidden_size) if moe.shared_ffn_hidden_size else []


def _forward_s(processor: Processor, product: Product) -> float:
    return matmul_s(processor, *product)


def _backward_s(processor: Processor, setup: TrainingSetup, product: Product) -> float:
    rows, columns, inner, count = product
    of_input = matmul_s(processor, rows, inner, columns, count)
    if setup.lora is not None:
        return of_input  # frozen weights have no gradient; the adapters' products are small
    summed = 2.0 * setup.main_gradient_bytes if setup.gradient_accumulation_fusion else 2.0
    return of_input + matmul_s(processor, columns, inner, rows, count, output_bytes=summed)


def _again(
    setup: TrainingSetup,
    machine: Machine,
    has_experts: bool,
    products: float,
    attention: float,
    elements: float,
    mlp: list[Product],
) -> float:
    if setup.recompute == "none":
        return 0.0
    if setup.recompute == "full":
        return (products + attention + elements) * recomputed_share(setup)
    modules = setup.recompute_modules
    seconds = attention if "core_attn" in modules else 0.0
    if "op" in modules:
        # torchtitan keeps attention's result and every second product (models/llama3/infra/parallelize.py).
        return seconds + 0.5 * products + elements
    if modules & {"layernorm", "moe_act"}:
        seconds += 0.5 * elements
    if "mla_up_proj" in modules and setup.shape.latent is not None:
        seconds += sum(_forward_s(machine.matmul, product) for product in _attention_products(setup)[1:-1])
    if ("mlp" in modules and not has_experts) or ("moe" in modules and has_experts):
        seconds += sum(_forward_s(machine.matmul, product) for product in mlp)
    return seconds


def recomputed_share(setup: TrainingSetup) -> float:
    """Share of the layers that full recompute computes again."""
    if setup.recompute_layers is None:
        return 1.0
    per_chunk = setup.shape.num_layers / (setup.pp * setup.vp)
    return min(1.0, setup.recompute_layers / per_chunk)
