"""Tiled MLP (ALST: Bekman et al. 2025, arXiv 2506.13996, section 3.1): each MLP computes its tokens in tiles, and its
intermediate activations are those of one tile, in forward and in backward.

Each tile is a checkpoint of torch's own. Autograd sums the tiles' gradients of a weight before its hooks run, so DDP,
FSDP2 and ZeRO see one gradient a micro batch. DeepSpeed's ``TiledMLP`` sums in ``grad`` and needs flags of ZeRO
(``ds_grad_is_ready``); it has nothing for DDP.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kit.engines.huggingface.models import transformer_layers
from kit.errors import EngineError
from kit.specs.layout import mlp_tiles


def tile_mlps(model: PreTrainedModel) -> None:
    """Replace ``forward`` of every layer's ``mlp``, which takes and returns (batch, sequence, hidden). Raises
    EngineError if a layer has no such module."""
    for layer in transformer_layers(model):
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, torch.nn.Module):
            raise EngineError(
                f"tiled_mlp=true with {type(model).__name__}, whose {type(layer).__name__} has no module mlp; leave it "
                "out"
            )
        _tile(mlp)


def _tile(mlp: torch.nn.Module) -> None:
    whole = mlp.forward

    def of_tile(tile: torch.Tensor) -> torch.Tensor:
        return whole(tile.contiguous())  # GPT-2's layers take a view of it

    def tiled(hidden: torch.Tensor) -> torch.Tensor:
        tiles = hidden.chunk(mlp_tiles(*hidden.shape[-2:]), dim=-2)
        if not torch.is_grad_enabled():
            return torch.cat([of_tile(tile) for tile in tiles], dim=-2)
        return torch.cat([checkpoint(of_tile, tile, use_reentrant=False) for tile in tiles], dim=-2)

    mlp.forward = tiled
