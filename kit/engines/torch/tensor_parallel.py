"""Tensor parallelism of a Hugging Face model by torch's DTensor, after transformers' own plan.

transformers says which linear layers are column-parallel and which are row-parallel (``base_model_tp_plan`` of the
configuration). torch.distributed.tensor.parallel shards these layers, and adds an all-reduce after each row-parallel
layer (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Embedding, norms and head are whole on every rank, with equal
gradients.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from kit.engines.huggingface.adapters import ADAPTER
from kit.engines.torch.transformers_plan import styles_of

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def cut(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard the linear layers of all transformer layers over ``mesh``, in place.

    Raises EngineError if transformers has no plan for the model, or if the plan has other styles than column- and
    row-parallel.
    """
    modules = dict(model.named_modules())
    styles = styles_of(model, "tp", mesh.size(), _STYLES, modules, "engine=megatron or deepspeed")
    plan = {
        part: _STYLES[style]() for name, style in styles.items() for part in _parts(name, modules[name], _STYLES[style])
    }
    parallelize_module(model, mesh, plan)


def _parts(name: str, module: torch.nn.Module, style: type[ParallelStyle]) -> list[str]:
    """Linear layers that are sharded like the layer ``name``: itself, or with a LoRA adapter the frozen layer, and B of
    a column-parallel or A of a row-parallel layer. The adapter's other half is whole on every rank, with equal
    gradients."""
    if not hasattr(module, "lora_A"):
        return [name]
    return [f"{name}.base_layer", f"{name}.lora_{'B' if style is ColwiseParallel else 'A'}.{ADAPTER}"]
