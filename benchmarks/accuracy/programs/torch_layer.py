"""What autograd keeps of layers in plain torch: litgpt, torchtune, torchtitan, nanotron. Bytes of a micro batch.

Read in each project's model file; every term is a tensor that an operator saves. ``compiled`` layers fuse chains of
element-wise operators, keep their inputs, and compute the rest again in backward.
"""

from __future__ import annotations

from benchmarks.accuracy.programs.published import PublishedWorkload

QUANTISED_INPUT_BYTES = 4.0
"""Per element of the input of each 4-bit linear layer, beyond what the 16-bit layer keeps. Estimated from rows: the
difference of litgpt's QLoRA and LoRA rows of one model (leave-one-source-out in docs/accuracy.md). No source explains
it: bitsandbytes (autograd/_functions.py, MatMul4Bit) keeps no input."""


def layer_terms(workload: PublishedWorkload, has_experts: bool = False) -> dict[str, float]:
    """Bytes that one layer saves for backward without recompute, by operator."""
    tp, tokens, shard = workload.layout.tp, workload.tokens, workload.shard_tokens
    terms = {"norms": _norm(workload) * _norms(workload) * shard}
    if not workload.gathers_again:
        # The first matrix of a block keeps its input as gathered (nanotron: tp_recompute_allgather off).
        terms["gathered"] = 2 * 2.0 * workload.model.hidden_size * (tokens - shard)
    terms["attention"] = _attention(workload) * tokens / tp + _scores(workload)
    terms["mlp"] = _experts(workload) * tokens if has_experts else _mlp(workload) * tokens / tp
    if workload.lora is not None:
        terms["adapters"] = _adapters(workload) * tokens
    if workload.lora is not None and workload.lora.four_bit and workload.implementation == "litgpt":
        terms["quantised"] = QUANTISED_INPUT_BYTES * linear_inputs(workload) * tokens
    return terms


def kept_bytes(workload: PublishedWorkload, layers: int, has_experts: bool = False) -> float:
    """Bytes that ``layers`` layers of a chunk save for backward under the run's recompute."""
    model = workload.model
    layers = max(layers - workload.offloaded_layers // len(workload.chunks), 0)
    layer_input = 2.0 * model.hidden_size * workload.shard_tokens
    whole = sum(layer_terms(workload, has_experts).values())
    if workload.layout.recompute == "full":
        recomputed = layers if workload.recompute_layers is None else min(workload.recompute_layers, layers)
        return (0.0 if workload.activation_offload else layer_input * recomputed) + whole * (layers - recomputed)
    if workload.activation_offload:
        return 0.0
    if workload.layout.recompute == "selective":
        share = min(workload.uncounted_layers, model.num_layers) / model.num_layers
        return layers * (layer_input + _saved_attention(workload) + (1 - share) * _saved_products(workload))
    return whole * layers


def _saved_attention(workload: PublishedWorkload) -> float:
    """torchtitan's policy per operator saves the kernel's output and log-sum-exp, of the kernels that it names."""
    if workload.recomputes_cudnn and workload.generation == "blackwell":
        return 0.0
    model = workload.model
    return (2.0 * model.query_width + 4.0 * model.num_attention_heads) / workload.layout.tp * workload.tokens


def _saved_products(workload: PublishedWorkload) -> float:
    """Every second matrix product: wq, wv, w1, w2 of wq wk wv wo w1 w3 w2. Backward does not need the last one's
    result, which torch.compile therefore drops; eager code keeps it."""
    model = workload.model
    split = 2.0 * (model.query_width + model.key_value_width + model.mlp_width) / workload.layout.tp
    return split * workload.tokens + (0.0 if workload.compiled else 2.0 * model.hidden_size * workload.shard_tokens)


def logits_bytes(workload: PublishedWorkload) -> float:
    """Fullest moment of head and loss.

    torch's cross entropy of fp32 logits: log-probabilities, their gradient and the logits' (4 + 4 + 4). litgpt computes
    head and loss in 16 bits and in chunks: logits and log-probabilities of all, gradients of a chunk. Chunked
    (torchtune): 16-bit logits of all, the rest for an eighth, and of a trained head the gradient so far and a chunk's.
    Compiled: 16-bit logits and their gradient. nanotron: the logits, their fp32 copy, and its difference from the
    maximum (parallel/tensor_parallel/functional.py, not in place).
    """
    entries = -(-workload.model.vocab_size // workload.layout.tp) * workload.tokens
    if workload.implementation == "litgpt":
        return (6 if workload.attention == "unfused" else 4) * entries  # 6: capped
    if workload.implementation == "nanotron":
        return 10 * entries
    if workload.layout.chunked_loss:
        head = 2 * 2.0 * workload.model.vocab_size * workload.model.hidden_size if workload.lora is None else 0.0
        return (2 + (2 if workload.compiled_loss else 10) / 8) * entries + head
    if workload.compiled_loss:
        return 4 * entries
    # Loss parallelism: log-probabilities, the gradient, two results on the way to it (torch, tensor/parallel/loss.py)
    return (16 if workload.implementation == "torchtitan" and workload.layout.tp > 1 else 12) * entries


def working_bytes(workload: PublishedWorkload) -> float:
    """Gradients of a layer's intermediate results that exist at once: three widths of the MLP, two of the stream."""
    model = workload.model
    return 2 * (
        3 * model.ffn_hidden_size / workload.layout.tp * workload.tokens + 2 * model.hidden_size * workload.shard_tokens
    )


def _norms(workload: PublishedWorkload) -> int:
    # Gemma 2 caps its attention scores, for which no fused kernel exists, and has norms after each block as well.
    after = workload.implementation == "litgpt" and workload.attention == "unfused"
    return 1 if workload.model.parallel_residual else 4 if after else 2


def _norm(workload: PublishedWorkload) -> float:
    """Bytes per token of a norm: its input in the precision it computes in, what the scale multiplies, its result."""
    h, trained = workload.model.hidden_size, workload.lora is None
    if workload.model.norm == "layernorm" or workload.implementation == "nanotron" or workload.compiled:
        return 4.0 * h if trained else 2.0 * h
    return (4.0 if not trained else 10.0 if workload.implementation == "litgpt" else 8.0) * h


def _attention(workload: PublishedWorkload) -> float:
    """Bytes per token: query, key, value, output. Grouped heads are repeated before the kernel, but for nanotron."""
    model = workload.model
    key_value = model.key_value_width if workload.implementation == "nanotron" else model.query_width
    if workload.implementation == "litgpt" and model.num_key_value_heads == model.num_attention_heads:
        # The value is a view of the whole projection's result, which therefore stays (litgpt/model.py); repeated heads
        # are copies instead.
        return 2.0 * (2 * model.query_width + 3 * model.query_width + model.query_width)
    # The output is transposed to (sequence, batch) and copied for the projection.
    copies = 2 if workload.implementation == "nanotron" and workload.layout.micro_batch_size > 1 else 1
    return 2.0 * (model.query_width + 2 * key_value + copies * model.query_width)


def _scores(workload: PublishedWorkload) -> float:
    """Log-sum-exp; with capped scores the tanh, fp32 probabilities and their 16-bit copy (litgpt/model.py)."""
    per_token = 4.0 if workload.attention != "unfused" else 8.0 * workload.job.seq_length
    return per_token * workload.model.num_attention_heads / workload.layout.tp * workload.tokens


def _mlp(workload: PublishedWorkload) -> float:
    f = workload.model.ffn_hidden_size
    if not workload.model.gated_mlp:
        return 4.0 * f if workload.lora is None else 2.0 * f
    # Frozen weights do not need the product, the input of the last matrix.
    return 8.0 * f if workload.lora is None and not workload.compiled else 6.0 * f


def _experts(workload: PublishedWorkload) -> float:
    """Bytes per token of torchtitan's experts, which no compiler fuses across their dispatch (models/moe.py): a token's
    copy gathered, weighed in fp32, sent, sorted by expert, and its result; gate, its activation, up, product; shared
    experts as a dense MLP."""
    model = workload.model
    copy = 12.0 * model.hidden_size + 8.0 * model.moe_ffn_hidden_size
    shared = (6.0 if workload.compiled else 8.0) * model.shared_ffn_hidden_size / workload.layout.tp
    return model.experts_per_token * copy + shared + 12.0 * model.num_experts


def linear_inputs(workload: PublishedWorkload) -> float:
    """Widths of the inputs of a layer's linear modules: of qkv, projection, gate, up, and down."""
    model = workload.model
    return model.hidden_size * (3 if model.gated_mlp else 2) + model.query_width + model.ffn_hidden_size


def _adapters(workload: PublishedWorkload) -> float:
    """litgpt's adapter keeps its own dropped-out input and the mask (litgpt/lora.py, LoRALinear.forward), torchtune's
    without dropout the input that all read, which compiled code computes again; and x·A."""
    lora, model = workload.lora, workload.model
    assert lora is not None
    h, f = model.hidden_size, model.ffn_hidden_size
    each = 3.0 if workload.implementation == "litgpt" else 0.0 if workload.compiled else 2.0
    inputs = h if lora.targets & {"query", "key", "value"} else 0
    inputs += model.query_width if "projection" in lora.targets else 0
    inputs += (2 * h if model.gated_mlp and each == 3.0 else h) + f if "mlp" in lora.targets else 0
    return each * inputs + 2.0 * lora.rank * max(len(lora.targets), 1)
