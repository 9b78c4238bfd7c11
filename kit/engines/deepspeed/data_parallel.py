"""Every rank computes its own samples with a Hugging Face model; the base of what DeepSpeed splits of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from kit.emit.run_directory import RunDirectory
from kit.engines.base import MicroBatch, StateBlock, StateKind, TensorSource
from kit.engines.deepspeed.state import FullyPartitionedState, ParameterState
from kit.engines.deepspeed.strategy import ModelParallelStrategy
from kit.engines.huggingface import experts
from kit.engines.huggingface.adapters import build_frozen, freeze_partitioned, trainable
from kit.engines.huggingface.buffers import SavedBuffers
from kit.engines.huggingface.models import build_model, check_shape, source_for_model
from kit.engines.kernels.chunked_loss import ChunkedLoss
from kit.engines.kernels.step import prepare, summed_loss

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DataParallel(ModelParallelStrategy):
    """All ranks are data-parallel."""

    chunked: ChunkedLoss | None = None

    def __init__(self, rundir: RunDirectory) -> None:
        self.rundir = rundir
        self._spec = rundir.plan.model
        self.dp_rank, self.dp_size = dist.get_rank(), dist.get_world_size()

    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """Stage 3: partitioned parameter by parameter while it is built, so that no rank ever holds it whole.

        transformers then initialises it module by module on rank 0, in another order than a whole model: random weights
        of stage 3 are as good as those of the other stages, but not the same. Below stage 3 the model is built in fp32;
        DeepSpeed casts it, and clones its fp32 master weights from the cast ones.
        """
        layout = self.rundir.plan.layout
        # Stage 3 clones masters from what is partitioned here, so under autocast that is fp32.
        precision = "fp32" if layout.autocast or layout.zero_stage < 3 else self.rundir.plan.job.precision
        device = torch.device(get_accelerator().current_device_name())
        lora = self.rundir.plan.job.lora
        # bitsandbytes quantises whole weights: those of QLoRA are partitioned afterwards, by deepspeed.initialize.
        partitioned = layout.zero_stage == 3 and not (lora and lora.four_bit)
        with _zero3_announced(settings, partitioned):
            if lora is not None and not partitioned:
                model = build_frozen(self.rundir, lora, device)
            else:
                model = build_model(self.rundir, DTYPES[precision], device)
        if lora is not None and partitioned:
            freeze_partitioned(model, self.rundir, lora)
        self.chunked = prepare(model, self.rundir)
        return model

    def attach(self, engine: deepspeed.DeepSpeedEngine, state: ParameterState) -> None:
        self.engine, self.state = engine, state
        # Tied parameters come once, under the name that transformers saves: the first.
        self.parameters = trainable(engine.module)
        # Those of a model with adapters are loaded with its frozen weights.
        self.buffers = SavedBuffers(
            torch.nn.Module() if self.rundir.plan.job.lora else engine.module, self.rundir.plan.model
        )

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        return summed_loss(self.engine, micro_batch, self.engine.device, self.chunked)

    @property
    def owners(self) -> Mapping[str, int]:
        """ZeRO gathers every tensor on every rank: the ranks export them in turn."""
        return {
            on_disk: number % dist.get_world_size()
            for number, name in enumerate(self.parameters)
            for on_disk in experts.names_on_disk(self._spec, name)
        } | dict.fromkeys(self.buffers.shapes, 0)

    def export_blocks(self, kind: StateKind) -> Iterator[StateBlock]:
        read = self.state.gradient if kind is StateKind.GRADIENT else partial(self.state.get, kind=kind)
        for number, (name, parameter) in enumerate(self.parameters.items()):
            whole = self.full_param(name, read(parameter)).detach()
            if number % dist.get_world_size() == dist.get_rank():
                for on_disk, tensor in experts.split_experts(self._spec, name, whole):
                    yield StateBlock.whole(kind, on_disk, tensor)
        if dist.get_rank() == 0:
            for name, buffer in self.buffers.export(kind):
                yield StateBlock.whole(kind, name, buffer)

    def load(self, kind: StateKind, source: TensorSource) -> None:
        """Raises CheckpointError where names or shapes are not the model's."""
        shapes = {name: self.shape(name) for name in self.parameters}
        source = source_for_model(self._spec, source, shapes, self.buffers, kind)
        for name, parameter in self.parameters.items():
            check_shape(name, shapes[name], source.shape(name))
            self.load_param(name, parameter, kind, source)

    def load_param(self, name: str, parameter: torch.nn.Parameter, kind: StateKind, source: TensorSource) -> None:
        """Set one parameter from ``source``; at stage 3 only this rank's part is read."""
        if isinstance(self.state, FullyPartitionedState):
            part = source.read_flat(name, *self.state.rank_range(parameter))
            self.state.set_part(parameter, kind, part.float())
        else:
            self.state.set(parameter, kind, source.read(name).float())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole parameter, as transformers has it."""
        parameter = self.parameters[name]
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def full_param(self, name: str, held: torch.Tensor) -> torch.Tensor:
        """The tensor that ZeRO's ranks hold together → the whole parameter, of ``shape(name)``."""
        return held


@contextmanager
def _zero3_announced(settings: dict[str, Any], stage3: bool) -> Iterator[None]:
    """transformers enters zero.Init, and gathers module by module to initialise, while such an object exists."""
    # transformers keeps a weak reference: the name must stay bound until the model is built.
    announcement = HfDeepSpeedConfig(settings) if stage3 else None
    try:
        yield
    finally:
        if announcement is not None:
            unset_hf_deepspeed_config()
