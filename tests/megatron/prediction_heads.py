"""Multi-token prediction in plain transformers and torch, to compare with (arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F

from kit.engines.protocol import IGNORE_INDEX
from kit.specs.model import ModelSpec
from tests.megatron.conftest import saved_model
from tests.support.hostile import spoil


def model_with_heads(spec: ModelSpec, path: Path) -> torch.nn.Module:
    """A model of ``spec`` whose heads are layers after its last one, saved to ``path`` as DeepSeek-V3 is."""
    layers = dataclasses.replace(spec, num_layers=spec.num_layers + spec.mtp_num_layers, mtp_num_layers=0)
    model = saved_model(layers, path)
    h, eps = spec.hidden_size, spec.norm_eps
    for layer in model.model.layers[spec.num_layers :]:
        norm = type(layer.input_layernorm)
        layer.enorm, layer.hnorm, layer.shared_head = norm(h, eps), norm(h, eps), torch.nn.Module()
        layer.shared_head.norm, layer.eh_proj = norm(h, eps), torch.nn.Linear(2 * h, h, bias=False)
        for part in (layer.enorm, layer.hnorm, layer.shared_head, layer.eh_proj):
            for parameter in part.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(path)
    spoil(path / "config.json", ("num_hidden_layers",), spec.num_layers)
    spoil(path / "config.json", ("num_nextn_predict_layers",), spec.mtp_num_layers)
    model.config.num_hidden_layers = spec.num_layers  # transformers' forward pass runs as many layers
    return model


def loss_of_heads(spec: ModelSpec, model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the heads of each head's summed loss; ``inputs`` and ``labels``: (rows, sequence). Head k predicts
    label k + 1 of the future from the hidden state of head k − 1 and the embedding of the token before that label."""
    inner, total = model.model, torch.zeros(())
    hidden = inner(input_ids=inputs, use_cache=False).last_hidden_state
    positions = torch.arange(inputs.shape[1])[None]
    rotation = inner.rotary_emb(hidden, positions)
    for layer in inner.layers[spec.num_layers :]:
        inputs, labels = F.pad(inputs[:, 1:], (0, 1)), F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        joined = torch.cat([layer.enorm(inner.embed_tokens(inputs)), layer.hnorm(hidden)], dim=-1)
        hidden = layer(layer.eh_proj(joined), attention_mask=None, position_ids=positions, position_embeddings=rotation)
        hidden = layer.shared_head.norm(hidden)
        total = total + F.cross_entropy(
            model.lm_head(hidden).float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
    return total / spec.mtp_num_layers
