"""AutoTP: DeepSpeed splits the linear layers of a Hugging Face model over neighbouring ranks. ZeRO shards each slice.

DeepSpeed records for its universal checkpoints how it split each parameter (module_inject/layers.py,
``_set_param_uc_meta``). This module joins slices by the same record. Every rank first builds the whole model: zero.Init
would partition over all ranks, but ranks of one tensor-parallel group have different slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

from kit.emit.run_directory import RunDirectory
from kit.engines.deepspeed.data_parallel import DataParallel
from kit.engines.deepspeed.state import ParameterState
from kit.engines.deepspeed.whole_model import whole_model
from kit.engines.huggingface.adapters import ADAPTER, build_frozen
from kit.engines.kernels.prepare_model import recompute
from kit.engines.protocol import StateKind, TensorShard, TensorSource, rectangles
from kit.errors import EngineError

_RECORD = "ds_autotp_universal_checkpoint_meta"


class AutoTensorParallel(DataParallel):
    """Tensor parallelism of Hugging Face layers. The ranks of a tensor-parallel group compute the same samples."""

    def __init__(self, rundir: RunDirectory) -> None:
        super().__init__(rundir)
        self._tp = rundir.plan.layout.tp
        self.dp_rank, self.dp_size = dist.get_rank() // self._tp, rundir.plan.layout.dp

    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """Build the whole model; ``deepspeed.initialize`` splits it."""
        device = torch.device(get_accelerator().current_device_name())
        lora = self.rundir.plan.job.lora
        if lora is None:
            model = whole_model(self._spec, self.rundir.plan.layout.zero_stage, self.dtype, device)
        else:
            model = build_frozen(self.rundir, lora, device)
            _bare_adapters(model)
        recompute(model, self.rundir.plan.layout)
        return model

    def attach(self, engine: deepspeed.DeepSpeedEngine, state: ParameterState) -> None:
        """Raises EngineError if DeepSpeed split no layer, or split a parameter into slices that are not contiguous."""
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

    def _own_blocks(self, kind: StateKind, name: str, start: int, values: torch.Tensor) -> Iterator[TensorShard]:
        """Blocks of a range of this rank's flattened slice; what is not split the first rank of a group exports."""
        number, cut = dist.get_rank(self.tensor_group), self._cuts[name]
        if cut is None:
            yield from super()._own_blocks(kind, name, start, values) if number == 0 else ()
            return
        dim, sizes = cut
        first, width = [0, 0], math.prod(super().shape(name)[1:])
        first[dim] = sum(sizes[:number])
        for row, column, part in rectangles(start, values, width):
            yield TensorShard(kind, name, self.shape(name), first[0] + row, first[1] + column, part)

    @property
    def _replica(self) -> tuple[int, int]:
        return self.dp_rank, self.dp_size

    def load_param(self, name: str, parameter: torch.nn.Parameter, kind: StateKind, source: TensorSource) -> None:
        """Read the whole tensor from ``source`` and set this rank's slice of it."""
        whole, cut = source.read(name), self._cuts[name]
        if cut is not None:
            whole = whole.split(cut[1], cut[0])[dist.get_rank(self.tensor_group)]
        self.state.set(parameter, kind, whole)

    def _cut(self, name: str, parameter: torch.nn.Parameter) -> tuple[int, list[int]] | None:
        """(dimension, sizes of the slices) of a split parameter; None: every rank has the whole parameter."""
        record = getattr(parameter, _RECORD, None)
        if record is None or record["partition_dim"] is None:
            return None
        if record["sub_param_sizes"] is not None or record["partition_sizes"] is None:
            raise EngineError(
                f"{name}: DeepSpeed's AutoTP splits it in a nested way ({record['partition_type']}), which cannot be "
                "exported here; use implementation=local for tensor parallelism of this model"
            )
        return int(record["partition_dim"]), list(record["partition_sizes"])


class _Adapted(torch.nn.Module):
    """A frozen layer with its adapter, under peft's names, without peft's property ``weight``: DeepSpeed would take the
    whole for one linear layer, and lose the adapter (module_inject/auto_tp.py, _replace_module)."""

    def __init__(self, layer: Any) -> None:
        """``layer``: peft's layer."""
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = layer.base_layer, layer.lora_A, layer.lora_B
        self._scale = layer.scaling[ADAPTER]

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """(…, inputs) → (…, outputs) of this rank. The adapter computes in its own dtype, as in peft."""
        low = self.lora_A[ADAPTER](input_.to(self.lora_A[ADAPTER].weight.dtype))
        output: torch.Tensor = self.base_layer(input_)
        return output + (self._scale * self.lora_B[ADAPTER](low)).to(output.dtype)


def _bare_adapters(model: torch.nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if hasattr(child, "lora_A"):
                setattr(module, name, _Adapted(child))
