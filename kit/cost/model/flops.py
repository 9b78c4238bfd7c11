"""Model FLOPs of a training step, without recompute.

A multiplication and an addition are two FLOPs. Backward is twice forward: one GEMM for the gradient of the input, one
for the gradient of the weight. Causal attention counts half of the scores (NeMo's convention since 25.09).
"""

from __future__ import annotations

from kit.cost.model.params import count
from kit.specs.model import ModelSpec


def layer_matmul_flops_per_token(model: ModelSpec) -> float:
    """Forward FLOPs per token in the matrices of the mean layer: 2 per parameter; only the experts of the token count.

    The mean is over dense layers and layers with experts, and over both stacks of an encoder-decoder. Source and target
    are assumed to have the same length.
    """
    return 2.0 * count(model).active_matrices / (model.num_layers + model.encoder_layers)


def layer_attention_flops_per_token(model: ModelSpec, seq_length: int) -> float:
    """Forward FLOPs per token in the attention of the mean layer: 2·2·s·a·d, halved by the causal mask.

    Encoder self-attention and cross-attention see the whole source. Through a sliding window of w positions a token
    sees w − w²/2s positions on average instead of s/2. Values may be narrower than queries and keys (latent attention).
    """
    seen, attending = seq_length / 2, model.num_layers
    if model.approximate is not None:
        attending = model.approximate.attention_layers
    if attending and model.windowed(seq_length):
        windows = [min(model.window(layer) or seq_length, seq_length) for layer in range(attending)]
        seen = sum(window - window**2 / (2 * seq_length) for window in windows) / attending
    if model.is_encoder_decoder:
        both = model.num_layers + model.encoder_layers
        seen = seq_length * (1.5 * model.num_layers + model.encoder_layers) / both
    value_head_dim = model.latent.value_head_dim if model.latent else model.head_dim
    of_attention = 2.0 * seen * model.num_attention_heads * (model.head_dim + value_head_dim)
    return of_attention * attending / model.num_layers + _of_states(model)


STATE_CHUNK = 64
"""Tokens in a chunk of a recurrent layer; a GEMM covers one chunk (fla and mamba-ssm: 64 to 256)."""


def _of_states(model: ModelSpec) -> float:
    """Forward FLOPs per token in the recurrent layers, as a mean over all layers. Decay of the state, its update with
    keys and values, and its product with the query: 2 per element each. In addition the GEMMs within a chunk (Mamba-2,
    arXiv 2405.21060, section 6; gated delta rule, arXiv 2412.06464, section 3.3)."""
    known = model.approximate
    if known is None:
        return 0.0
    each = 6.0 * known.state + 2.0 * STATE_CHUNK * known.state_width
    return each * known.recurrent_layers / model.num_layers


def head_flops_per_token(model: ModelSpec) -> float:
    """Forward FLOPs per token of the output projection, tied or not."""
    return 2.0 * model.vocab_size * model.hidden_size


def model_flops_per_token(model: ModelSpec, seq_length: int, frozen: bool = False) -> float:
    """FLOPs per token of forward and backward, as MFU counts them.

    ``frozen``: LoRA training. Frozen matrices have an input gradient but no weight gradient. The adapters' own GEMMs
    are not counted, neither here nor in the step time.
    """
    layers = model.num_layers + model.encoder_layers
    matrices = layers * layer_matmul_flops_per_token(model) + head_flops_per_token(model)
    if heads := model.mtp_num_layers:
        joining = 2.0 * 2 * model.hidden_size**2
        matrices += heads * (2.0 * count(model).layer.active + joining + head_flops_per_token(model))
        layers += heads
    attention = layers * layer_attention_flops_per_token(model, seq_length)
    return (2.0 if frozen else 3.0) * matrices + 3.0 * attention
