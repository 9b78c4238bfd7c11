"""Which matrices megatron-core's Muon orthogonalises: those that a Hugging Face checkpoint has.

megatron-core computes query, key and value, and gate and up, in one GEMM, and by itself splits the former only
(optimizer/emerging_optimizers.py, TensorParallelMuon.orthogonalize). Its split takes any number of rows per group, so
the same code orthogonalises gate and up one by one. Each matrix is gathered over the tensor-parallel ranks before
(``muon_tp_mode: duplicated``).
"""

from __future__ import annotations

from typing import Any

from kit.engines.megatron.resharding.huggingface import HfResharder


def mark_matrices(resharder: HfResharder) -> None:
    """Tell megatron-core's Muon which rows of each parameter belong to which matrix, in place."""
    for mapped in resharder.mapped_params:
        pieces = resharder.slices(mapped, resharder.shard_groups(mapped).tensor.rank())
        period = len(mapped.hugging_face)
        assert all(piece.tensor == index % period for index, piece in enumerate(pieces)), "a rule refuses split groups"
        for param in resharder.held(mapped):
            stepped: Any = getattr(param, "main_param", param)
            stepped.is_qkv = period > 1
            stepped.qkv_split_shapes = [piece.length for piece in pieces[:period]]
