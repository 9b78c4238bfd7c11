"""What compressed exchanges send, and what compressing costs: ZeRO++ on DeepSpeed's stage 3, hooks on torch's DDP.

ZeRO++ (arXiv 2306.10209) as DeepSpeed 0.19.8 has it. qwZ gathers weights in int8 wherever they are gathered
(partition_parameters.py, CUDAQuantizer). hpZ keeps a second copy over the ranks of a node from the first gather of a
step until the optimizer's (stage3.py, invalidate_secondary_tensor): **only the first forward pass of a step** gathers
across nodes, also with accumulation. qgZ exchanges gradients in int4, first inside nodes, then what is left between
them (comm/coalesced_collectives.py, all_to_all_quant_reduce).
"""

from __future__ import annotations

from typing import NamedTuple

from kit.specs.layout import GradientCompression, Layout
from kit.specs.model import ModelSpec

INT8_BYTES = 1.0 + 4 / 8000
"""A weight and its part of a scale: groups of about 8,000 (CUDAQuantizer.target_group_size), a float each."""
INT4_BYTES = 0.5 + 4 / 4096
"""A gradient and its part of a scale: a group is at least a matrix's row (all_to_all_quant_reduce)."""
DEQUANTISE_BYTES = 12.0
"""Moved per gathered weight: int8 read, fp16 written and read again to become bf16, 16 bits written and copied."""
QUANTISE_GRADIENT_BYTES = 6.0
"""Moved per gradient: 16 bits read, int4 written, received ones read, summed and written once more, twice."""

POWERSGD_RANK = 4
"""Columns of each factor. Vogels et al. (arXiv 1905.13727, table 3) reach SGD's accuracy with 2 to 4."""
POWERSGD_BYTES = 60.0
"""Memory moved per gradient: the error added (12), two products with it (8), the approximation made (8), the new error
(12), and the copies in and out of DDP's bucket (20): torch, powerSGD_hook.py, read operator by operator."""
CAST_BYTES = 12.0
"""Memory moved per gradient by the bf16 hook: fp32 read, bf16 written, and back (default_hooks.py)."""


class ZeroPlusPlus(NamedTuple):
    """The parts of ZeRO++ that are on."""

    hpz: int = 1
    """Ranks that share a second copy; 1 = none."""
    weights: bool = False
    gradients: bool = False

    @classmethod
    def of(cls, layout: Layout) -> ZeroPlusPlus | None:
        """What a layout asks for, or None."""
        found = cls(layout.zero_hpz, layout.zero_quantized_weights, layout.zero_quantized_gradients)
        return None if found == cls() else found


def gradient_bytes(model: ModelSpec, kind: GradientCompression, width: float, parameters: int) -> float:
    """Bytes sent per gradient of ``width`` bytes where an all-reduce sends each once; ``parameters``: of the model.

    PowerSGD sends two factors of each matrix in fp32, and what is no matrix, or too small to gain, whole.
    """
    if kind == "none":
        return width
    if kind == "bf16":
        return 2.0
    factors = sum(4.0 * POWERSGD_RANK * (rows + columns) for rows, columns in _matrices(model))
    covered = sum(rows * columns for rows, columns in _matrices(model))
    return (factors + 4.0 * max(0, parameters - covered)) / parameters


def kernel_bytes(kind: GradientCompression) -> float:
    """Memory moved per gradient and step by the hook itself."""
    return {"none": 0.0, "bf16": CAST_BYTES, "powersgd": POWERSGD_BYTES}[kind]


def _matrices(model: ModelSpec) -> list[tuple[int, int]]:
    """Rows and columns of every matrix, as transformers holds them; experts of a layer are one tensor each way, which
    DDP's hook sees as (experts, the rest)."""
    h, kv, query = model.hidden_size, model.key_value_width, model.query_width
    layer = [(query, h), (kv, h), (kv, h), (h, query)]
    if model.num_experts:
        wide = model.moe_ffn_hidden_size
        layer += [(model.num_experts, 2 * wide * h), (model.num_experts, wide * h), (model.num_experts, h)]
    else:
        layer += [(model.ffn_hidden_size, h)] * (2 if model.gated_mlp else 1) + [(h, model.ffn_hidden_size)]
    ends = [(model.vocab_size, h)] * (1 if model.tied_embeddings else 2)
    return layer * model.num_layers + ends
