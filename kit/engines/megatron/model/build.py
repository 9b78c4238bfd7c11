"""Builds this rank's chunks of a GPTModel. Logits and loss equal those of the Hugging Face model of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from kit.engines.megatron.model.layers import block_spec, prediction_heads
from kit.engines.megatron.model.rope import DualRotaryEmbedding, HfRotaryEmbedding
from kit.engines.megatron.model.transformer_engine import fused_block_spec
from kit.errors import EngineError
from kit.specs.model import ModelSpec

_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
# gate·σ(1.702·gate). megatron-core clamps gate and up, and adds 1 to up (transformer/mlp.py, glu).
_ACTIVATIONS["clamped_swiglu"] = lambda gate: gate * torch.sigmoid(1.702 * gate)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LanguageModel(GPTModel):
    """GPTModel that excludes the vocabulary's padding rows from the loss, and can rotate by given positions.

    Each padding row would add ``exp(0)`` to the denominator of the softmax: about ln(128/126) nats for a vocabulary of
    126 that is padded to 128.
    """

    def __init__(self, *args: Any, unpadded_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        local_rows = self.vocab_size // self.tp_group.size()
        first_row = self.tp_group.rank() * local_rows
        self._real_rows = max(0, min(local_rows, unpadded_vocab_size - first_row))

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any, rotate: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Forward of GPTModel. ``position_ids``: (batch, sequence of this rank). ``rotate``: rotate by
        ``position_ids``; otherwise positions are 0, 1, 2, …"""
        if self.position_embedding_type == "rope":
            self.rotary_pos_emb.positions = position_ids if rotate else None
        return super().forward(input_ids, position_ids, *args, **kwargs)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``labels`` (batch, sequence), ``logits`` (sequence, batch, vocabulary / tp) → fp32 (batch, sequence)."""
        if self._real_rows < logits.shape[-1]:
            logits[..., self._real_rows :] = -torch.inf
        return super().compute_language_model_loss(labels, logits)


def transformer_config(settings: Mapping[str, Any]) -> TransformerConfig:
    """Convert ``transformer_config`` of megatron.yaml to megatron-core's class. Replaces names of dtypes and functions
    by the objects. Raises EngineError if megatron-core refuses a value."""
    if settings.get("calculate_per_token_loss") is not True:
        raise EngineError(
            f"transformer_config.calculate_per_token_loss={settings.get('calculate_per_token_loss')} in megatron.yaml: "
            f"losses are divided by the global number of tokens; set it to true"
        )
    resolved = {
        **settings,
        "activation_func": _named(_ACTIVATIONS, settings, "activation_func"),
        "params_dtype": _named(_DTYPES, settings, "params_dtype"),
        # The engine sets every weight afterwards. perform_initialization=False is no alternative: parameters would lack
        # tensor_model_parallel (tensor_parallel/layers.py), and the gradient norm of a sharded model would be wrong.
        "init_method": _leave,
        "output_layer_init_method": _leave,
    }
    if settings.get("window_size") is not None:
        resolved["window_size"] = tuple(settings["window_size"])
    if "pipeline_dtype" in settings:
        resolved["pipeline_dtype"] = _named(_DTYPES, settings, "pipeline_dtype")
    try:
        return TransformerConfig(**resolved)
    except (TypeError, ValueError, AssertionError) as error:
        raise EngineError(f"megatron-core refuses transformer_config in megatron.yaml: {error}") from error


def build_chunks(
    model: ModelSpec, config: TransformerConfig, settings: Mapping[str, Any], implementation: str = "local"
) -> list[torch.nn.Module]:
    """One module per virtual pipeline stage of this rank, on the current device, with weights that are not set."""
    stages: list[int | None] = list(range(config.virtual_pipeline_model_parallel_size or 0)) or [None]
    return [_chunk(model, config, settings, stage, implementation) for stage in stages]


def _chunk(
    model: ModelSpec, config: TransformerConfig, settings: Mapping[str, Any], vp_stage: int | None, implementation: str
) -> torch.nn.Module:
    chunk = LanguageModel(
        config,
        fused_block_spec(config, vp_stage)
        if implementation == "transformer_engine"
        else block_spec(model, config, vp_stage),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        mtp_block_spec=prediction_heads(model, config, vp_stage),
        vp_stage=vp_stage,
        unpadded_vocab_size=model.vocab_size,
        **settings,
    )
    for shared in (module for module in chunk.modules() if isinstance(module, SharedExpertMLP)):
        if shared.use_shared_expert_gate:  # megatron-core builds this weight on the CPU
            shared.gate_weight.data = shared.gate_weight.data.to(torch.cuda.current_device())
    if not model.learned_positions:
        rotation = HfRotaryEmbedding if model.local_rope_theta is None else DualRotaryEmbedding
        chunk.rotary_pos_emb = rotation(model, chunk.pg_collection.cp)
    factor = model.embedding_multiplier
    if model.traits.scaled_embedding:
        # The factor is rounded to the dtype of the weights, as in transformers (Gemma2TextScaledWordEmbedding).
        factor = torch.tensor(model.hidden_size**0.5).to(config.params_dtype).item()
    if factor != 1 and chunk.pre_process:
        chunk.embedding.register_forward_hook(lambda _module, _inputs, output: output * factor)
    if model.logits_divisor != 1 and chunk.post_process:
        chunk.output_layer.register_forward_hook(partial(_divided, model.logits_divisor))
    if model.logit_softcap is not None and chunk.post_process:
        chunk.output_layer.register_forward_hook(partial(_capped, model.logit_softcap))
    if not config.bf16:
        return chunk
    wrapped = Float16Module(config, chunk)
    for router in (module for module in wrapped.modules() if isinstance(module, TopKRouter)):
        router._maintain_float32_expert_bias()  # before weights are set; else in the first forward
    return wrapped


def _capped(cap: float, _module: Any, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return cap * torch.tanh(output[0] / cap), output[1]


def _divided(divisor: float, _module: Any, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return output[0] / divisor, output[1]


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _named(table: Mapping[str, Any], settings: Mapping[str, Any], key: str) -> Any:
    if settings[key] not in table:
        raise EngineError(f"{key}={settings[key]} in megatron.yaml is not known; use {' or '.join(table)}")
    return table[settings[key]]
