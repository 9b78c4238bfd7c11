"""Layers with norms, factors, biases or residual connections that megatron-core's own layers do not support."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from kit.engines.megatron.model.adapted_linear import RowLinear
from kit.engines.megatron.model.norms import NORMS


class NormedRowParallelLinear(RowLinear):
    """Output projection of attention or MLP, followed by a norm before the residual add (Gemma 2 and 3, OLMo)."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = NORMS[config.normalization](config, output_size, config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(sequence, batch, input / tp) → (sequence, batch, output), summed over tensor-parallel ranks; no bias."""
        output, bias = super().forward(input_)
        assert bias is None
        return self.post_layernorm(output), None


class ScaledRowParallelLinear(RowLinear):
    """Output projection of attention or MLP, multiplied by a factor before the residual add (Granite)."""

    factor: float

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(sequence, batch, input / tp) → (sequence, batch, output), summed over tensor-parallel ranks; no bias."""
        output, bias = super().forward(input_)
        assert bias is None
        return output * self.factor, None


class ExpertRowParallelLinear(RowParallelLinear):
    """Output projection of an expert with a bias. The planner's rules allow etp=1 only for experts with a bias.

    megatron-core assumes that all tensor-parallel ranks share the bias of a row-parallel layer. Under sequence
    parallelism it would sum the gradients of different experts' biases, and it would count the biases of one rank only
    in the gradient norm.
    """

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        if self.bias is not None:
            self.bias.sequence_parallel = False
            set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=1)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Forward of RowParallelLinear, with a copy of the output. The MLP adds the bias in place; autograd forbids
        this if the output is the input of an all-reduce over one rank."""
        output, bias = super().forward(input_)
        return (output if bias is None else output.clone()), bias


class ParallelResidualLayer(TransformerLayer):
    """Parallel residual (GPT-NeoX, GPT-J): attention and MLP read the same input, and both outputs are added to it."""

    _layer_input: torch.Tensor | None = None

    def _forward_attention(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._layer_input = hidden_states
        return super()._forward_attention(hidden_states, *args, **kwargs)

    def _forward_pre_mlp_layernorm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        layer_input, self._layer_input = self._layer_input, None
        return super()._forward_pre_mlp_layernorm(layer_input)
