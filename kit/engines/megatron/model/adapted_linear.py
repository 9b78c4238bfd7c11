"""Linear layers that may have a LoRA adapter (arXiv 2106.09685) beside their frozen weight.

megatron-core computes query, key and value, or gate and up, in one GEMM. In peft each of these Hugging Face tensors has
an A and a B of its own. Here A (rank · tensors, input) stacks the tensors' A, and B (output, rank) has the rows of the
layer's weight, in the same order. Tensor parallelism splits both like the weight:

    column-parallel   every rank has the whole A, and the rows of B that belong to its rows of the weight
    row-parallel      every rank has its columns of A, and the whole B
    replicated        every rank has both
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

_Collective = Callable[[torch.Tensor], torch.Tensor]


class Adapter(torch.nn.Module):
    """scale · B · A · input, which is added to a layer's output."""

    of_tensor: torch.Tensor

    def __init__(self, linear: Any, config: TransformerConfig, of_tensor: torch.Tensor, rank: int, scale: float):
        """``of_tensor``: (rows of the weight on this rank, Hugging Face tensors); 1 where a row belongs to a tensor,
        otherwise 0. ``rank``: LoRA's rank."""
        super().__init__()
        outputs, inputs = linear.weight.shape
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.a = torch.nn.Parameter(torch.empty(rank * of_tensor.shape[1], inputs, **like))
        self.b = torch.nn.Parameter(torch.empty(outputs, rank, **like))
        self.register_buffer("of_tensor", of_tensor.to(linear.weight)[..., None], persistent=False)
        self._scale, self._collective = scale, _collective(linear, config.sequence_parallel)
        for weight, splits, dim in (
            (self.a, isinstance(linear, RowParallelLinear), 1),
            (self.b, isinstance(linear, ColumnParallelLinear), 0),
        ):
            if splits:
                set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
            else:  # under sequence parallelism megatron-core sums the gradients of the ranks' parts of the sequence
                weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """The layer's input → a tensor like the layer's output."""
        low = self._collective(F.linear(input_, self.a))
        # (output, tensors, rank): each row of B in the columns of its own tensor
        return F.linear(self._scale * low, (self.b[:, None] * self.of_tensor).flatten(1))


def _collective(linear: torch.nn.Module, sequence_parallel: bool) -> _Collective:
    """The collective between A and B. In backward, a gather becomes a reduce-scatter, a copy an all-reduce, and the
    reverse."""
    if isinstance(linear, RowParallelLinear):
        return (
            reduce_scatter_to_sequence_parallel_region
            if sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
    if isinstance(linear, ColumnParallelLinear):
        return gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
    return torch.nn.Identity()


class _Adaptable(torch.nn.Module):
    """Adds the output of ``adapter``, if there is one. The output is before a norm or a factor of a subclass."""

    weight: torch.nn.Parameter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter: Adapter | None = None

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """(output, bias) of megatron-core's layer."""
        output, bias = super().forward(input_, *args, **kwargs)
        return (output if self.adapter is None else output + self.adapter(input_)), bias


class ColumnLinear(_Adaptable, ColumnParallelLinear):
    """megatron-core's column-parallel layer."""


class RowLinear(_Adaptable, RowParallelLinear):
    """megatron-core's row-parallel layer."""


class ReplicatedLinear(torch.nn.Linear):
    """A projection with the whole weight on every rank. Under sequence parallelism its input is this rank's part of the
    sequence."""

    weight: Any

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        device = torch.cuda.current_device()
        super().__init__(inputs, outputs, bias=False, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.adapter: Adapter | None = None

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """(…, inputs) → (…, outputs)."""
        output = super().forward(input_)
        return output if self.adapter is None else output + self.adapter(input_)


ADAPTABLE = (ColumnLinear, RowLinear, ReplicatedLinear)
