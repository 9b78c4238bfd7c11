"""Python imports this by itself where the folder is on its path: accelerate, which looks for CUDA and nccl only, then
connects processes without a GPU by gloo. Scripts and configurations stay what they are on GPUs."""

from __future__ import annotations

import os
from typing import Any


def _connect() -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = PartialState._prepare_backend
    # Examples of transformers 4.57 ask for TPU, which accelerate 1.0 renamed to XLA.
    DistributedType.TPU = getattr(DistributedType, "TPU", DistributedType.XLA)

    def prepare(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        if cpu or "LOCAL_RANK" not in os.environ:
            return original(self, cpu, *args, **kwargs)
        # MULTI_GPU carries FSDP2; plain DDP would be given device numbers, which CPU modules do not have.
        fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        return "gloo", DistributedType.MULTI_GPU if fsdp else DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare


def _without_shared_memory_op() -> None:
    """Without a GPU DeepSpeed first compiles an all-reduce that only inference uses (comm/torch.py, build_shm_op)."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# Not in the launcher, which imports accelerate too and has no rank.
if "LOCAL_RANK" in os.environ:
    _connect()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        _without_shared_memory_op()
