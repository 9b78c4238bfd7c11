"""Expert parallelism of a Hugging Face model beside FSDP2, by transformers' own plans.

transformers says which parameters have a first dimension of experts and which modules compute them
(``base_model_ep_plan`` of the configuration). Its AllToAllEP gives each rank of a group whole experts, and sends each
token to the ranks of its experts and back (transformers/distributed/expert_parallel.py). Data-parallel ranks have
tokens of their own, so the group is a part of them. FSDP2 shards an expert over the ranks that have it, one of each
group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from kit.engines.torch.transformers_plan import styles_of

_DISPATCH, _SHARD = "ep_dispatch_experts", "grouped_gemm"


def experts_mesh(device: torch.device, ep: int) -> DeviceMesh:
    """Mesh of all ranks, of shape (copies of an expert, ep). Neighbouring ranks share out the experts."""
    return init_device_mesh(device.type, (dist.get_world_size() // ep, ep), mesh_dim_names=("copies", "ep"))


def spread(model: PreTrainedModel, mesh: DeviceMesh, alone: DeviceMesh) -> list[torch.nn.Module]:
    """Give each rank of ``mesh["ep"]`` its experts of all layers, in place. Returns the modules that compute experts.

    ``alone``: a mesh of one rank, whose tokens no other rank has. Raises EngineError if transformers has no plan for
    the model, or one with other styles.
    """
    # A module must come after its parameters: it reads how many experts they have left to this rank.
    named = [name for name, _ in (*model.named_parameters(), *model.named_modules())]
    plan = dict(styles_of(model, "ep", mesh["ep"].size(), (_DISPATCH, _SHARD), named, "engine=megatron"))
    apply_expert_parallelism(model, mesh["ep"], alone, plan, "all_to_all")
    return [model.get_submodule(name) for name, style in plan.items() if style == _DISPATCH]
