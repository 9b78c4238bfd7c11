"""AutoTP: DeepSpeed cuts the linear layers of a Hugging Face model over neighbouring ranks, and ZeRO what is left.

DeepSpeed records with every cut parameter how it was cut (module_inject/layers.py, ``_set_param_uc_meta``), for its
universal checkpoints; the same record joins parameters here. It takes the whole model on every rank to cut it:
zero.Init would partition over ranks of which only some hold the same.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

from kit.emit.run_directory import RunDirectory
from kit.engines.base import StateKind, TensorSource
from kit.engines.deepspeed.data_parallel import DataParallel
from kit.engines.deepspeed.state import ParameterState
from kit.engines.huggingface.models import build_model
from kit.errors import EngineError

_RECORD = "ds_autotp_universal_checkpoint_meta"


class AutoTensorParallel(DataParallel):
    """Tensor parallelism of Hugging Face layers; ranks of a group compute the same samples."""

    def __init__(self, rundir: RunDirectory) -> None:
        super().__init__(rundir)
        self._tp = rundir.plan.layout.tp
        self.dp_rank, self.dp_size = dist.get_rank() // self._tp, rundir.plan.layout.dp

    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """The whole model; ``deepspeed.initialize`` cuts it."""
        device = torch.device(get_accelerator().current_device_name())
        model = build_model(self.rundir, torch.float32, device)
        if self.rundir.plan.layout.recompute == "full":
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    def attach(self, engine: deepspeed.DeepSpeedEngine, state: ParameterState) -> None:
        """Raises EngineError where DeepSpeed split a parameter into more than contiguous slices."""
        super().attach(engine, state)
        self.tokens_group = groups._get_data_parallel_group()
        self.tensor_group = groups.get_tensor_model_parallel_group()
        self._cuts = {name: self._cut(name, parameter) for name, parameter in self.parameters.items()}
        if all(cut is None for cut in self._cuts.values()):
            raise EngineError(
                f"tensor_parallel.autotp_size={self._tp}: DeepSpeed split no layer of {self._spec.name}; "
                "use implementation=local, or tp=1"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        shape, cut = list(super().shape(name)), self._cuts[name]
        if cut is not None:
            shape[cut[0]] = sum(cut[1])
        return tuple(shape)

    def full_param(self, name: str, held: torch.Tensor) -> torch.Tensor:
        """Collective: this rank's slice → the whole parameter, of ``shape(name)`` and the same dtype: slices of all
        tensor-parallel ranks, concatenated."""
        cut = self._cuts[name]
        if cut is None:
            return held
        dim, sizes = cut
        slices = [held.new_empty(*held.shape[:dim], size, *held.shape[dim + 1 :]) for size in sizes]
        dist.all_gather(slices, held.contiguous(), group=self.tensor_group)
        return torch.cat(slices, dim)

    def load_param(self, name: str, parameter: torch.nn.Parameter, kind: StateKind, source: TensorSource) -> None:
        """Set this rank's slice from the whole tensor."""
        whole, cut = source.read(name).float(), self._cuts[name]
        if cut is not None:
            whole = whole.split(cut[1], cut[0])[dist.get_rank(self.tensor_group)].contiguous()
        self.state.set(parameter, kind, whole)

    def _cut(self, name: str, parameter: torch.nn.Parameter) -> tuple[int, list[int]] | None:
        """(dimension, sizes of the slices) as DeepSpeed cut it; None: whole on every rank."""
        record = getattr(parameter, _RECORD, None)
        if record is None or record["partition_dim"] is None:
            return None
        if record["sub_param_sizes"] is not None or record["partition_sizes"] is None:
            raise EngineError(
                f"{name}: DeepSpeed's AutoTP splits it in a nested way ({record['partition_type']}), which cannot be "
                "exported here; use implementation=local for tensor parallelism of this model"
            )
        return int(record["partition_dim"]), list(record["partition_sizes"])
