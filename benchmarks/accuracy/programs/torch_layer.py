"""What autograd keeps of layers in plain torch: litgpt, torchtune, torchtitan, nanotron. Bytes of a micro batch.

Read in each project's model file; every term is a tensor that an operator saves. ``compiled`` layers fuse chains of
element-wise operators, keep their inputs, and compute the rest again in backward.
"""

from __future__ import annotations

from benchmarks.accuracy.programs.setup import PublishedSetup

QUANTISED_INPUT_BYTES = 4.0
"""Per element of the input of each 4-bit linear layer, beyond what the 16-bit layer keeps. Estimated from rows: the
difference of litgpt's QLoRA and LoRA rows of one model (leave-one-source-out in docs/accuracy.md). No source explains
it: bitsandbytes (autograd/_functions.py, MatMul4Bit) keeps no input."""


def layer_terms(setup: PublishedSetup) -> dict[str, float]:
    """Bytes that one layer saves for backward without recompute, by operator."""
    tp, tokens, shard = setup.tp, setup.tokens, setup.shard_tokens
    terms = {"norms": _norm(setup) * _norms(setup) * shard}
    if not setup.gathers_again:
        # The first matrix of a block keeps its input as gathered (nanotron: tp_recompute_allgather off).
        terms["gathered"] = 2 * 2.0 * setup.shape.hidden_size * (tokens - shard)
    terms["attention"] = _attention(setup) * tokens / tp + _scores(setup)
    terms["mlp"] = _mlp(setup) * tokens / tp
    if setup.lora is not None:
        terms["adapters"] = _adapters(setup) * tokens
    if setup.lora is not None and setup.lora.four_bit and setup.kernels == "litgpt":
        terms["quantised"] = QUANTISED_INPUT_BYTES * linear_inputs(setup) * tokens
    return terms


def kept_bytes(setup: PublishedSetup) -> float:
    """Bytes that one layer saves for backward under the run's recompute."""
    shape = setup.shape
    layer_input = 2.0 * shape.hidden_size * setup.shard_tokens
    if setup.recompute == "full":
        return 0.0 if setup.activation_offload else layer_input
    if setup.recompute == "selective":
        # torchtitan's policy saves every second matrix product (wq, wv, w1, w2 of wq wk wv wo w1 w3 w2) and attention.
        split = 2 * (2 * shape.query_width + shape.key_value_width + shape.ffn_hidden_size) / setup.tp
        scores = 4 * shape.num_attention_heads / setup.tp
        return layer_input + 2.0 * shape.hidden_size * setup.shard_tokens + (split + scores) * setup.tokens
    return sum(layer_terms(setup).values())


def logits_bytes(setup: PublishedSetup) -> float:
    """Fullest moment of head and loss.

    torch's cross entropy of fp32 logits: log-probabilities, their gradient and the logits' (4 + 4 + 4). litgpt computes
    head and loss in 16 bits and in chunks: logits and log-probabilities of all, gradients of a chunk. Chunked
    (torchtune): 16-bit logits of all, the rest for an eighth. Compiled: 16-bit logits and their gradient. nanotron: the
    logits, their fp32 copy, and its difference from the maximum (parallel/tensor_parallel/functional.py, not in place).
    """
    entries = -(-setup.shape.vocab_size // setup.tp) * setup.tokens
    if setup.kernels == "litgpt":
        capped = 2 if setup.attention == "unfused" else 0
        return (4 + capped) * entries
    if setup.kernels == "nanotron":
        return 10 * entries
    if setup.chunked_loss:
        return (2 + 10 / 8) * entries
    if setup.compiled_loss:
        return 4 * entries
    # Loss parallelism: log-probabilities, the gradient, two results on the way to it (torch, tensor/parallel/loss.py)
    return (16 if setup.kernels == "torchtitan" and setup.tp > 1 else 12) * entries


def working_bytes(setup: PublishedSetup) -> float:
    """Gradients of a layer's intermediate results that exist at once: three widths of the MLP, two of the stream."""
    shape = setup.shape
    return 2 * (3 * shape.ffn_hidden_size / setup.tp * setup.tokens + 2 * shape.hidden_size * setup.shard_tokens)


def _norms(setup: PublishedSetup) -> int:
    if setup.shape.parallel_residual:
        return 1
    # Gemma 2 caps its attention scores, for which no fused kernel exists, and has norms after each block as well.
    return 4 if setup.kernels == "litgpt" and setup.attention == "unfused" else 2


def _norm(setup: PublishedSetup) -> float:
    """Bytes per token of a norm: its input in the precision it computes in, what the scale multiplies, its result."""
    h, trained = setup.shape.hidden_size, setup.lora is None
    if setup.shape.norm == "layernorm" or setup.kernels == "nanotron" or setup.compiled:
        return 4.0 * h if trained else 2.0 * h
    if setup.kernels == "litgpt":
        return 10.0 * h if trained else 4.0 * h
    return 8.0 * h if trained else 4.0 * h


def _attention(setup: PublishedSetup) -> float:
    """Bytes per token: query, key, value, output. Grouped heads are repeated before the kernel, but for nanotron."""
    shape = setup.shape
    key_value = shape.key_value_width if setup.kernels == "nanotron" else shape.query_width
    if setup.kernels == "litgpt" and shape.num_key_value_heads == shape.num_attention_heads:
        # The value is a view of the whole projection's result, which therefore stays (litgpt/model.py); repeated heads
        # are copies instead.
        return 2.0 * (2 * shape.query_width + 3 * shape.query_width + shape.query_width)
    copies = 1
    if setup.kernels == "nanotron" and setup.micro_batch_size > 1:
        copies = 2  # the output is transposed to (sequence, batch) and copied for the projection
    return 2.0 * (shape.query_width + 2 * key_value + copies * shape.query_width)


def _scores(setup: PublishedSetup) -> float:
    """Log-sum-exp; with capped scores the tanh, fp32 probabilities and their 16-bit copy (litgpt/model.py)."""
    per_token = 4.0 if setup.attention != "unfused" else 8.0 * setup.seq_length
    return per_token * setup.shape.num_attention_heads / setup.tp * setup.tokens


def _mlp(setup: PublishedSetup) -> float:
    f = setup.shape.ffn_hidden_size
    if not setup.shape.gated_mlp:
        return 4.0 * f if setup.lora is None else 2.0 * f
    if setup.compiled:
        return 6.0 * f
    # Frozen weights do not need the product, the input of the last matrix.
    return 8.0 * f if setup.lora is None else 6.0 * f


def linear_inputs(setup: PublishedSetup) -> float:
    """Widths of the inputs of a layer's linear modules: of qkv, projection, gate, up, and down."""
    shape = setup.shape
    return shape.hidden_size * (3 if shape.gated_mlp else 2) + shape.query_width + shape.ffn_hidden_size


def _adapters(setup: PublishedSetup) -> float:
    """An adapter keeps its own dropped-out input and the mask (litgpt/lora.py, LoRALinear.forward), and x·A."""
    lora, shape = setup.lora, setup.shape
    assert lora is not None
    h, f = shape.hidden_size, shape.ffn_hidden_size
    inputs = 0.0
    if lora.targets & {"query", "key", "value"}:
        inputs += h
    if "projection" in lora.targets:
        inputs += shape.query_width
    if "mlp" in lora.targets:
        inputs += (2 * h if shape.gated_mlp else h) + f
    return 3.0 * inputs + 2.0 * lora.rank * max(len(lora.targets), 1)
