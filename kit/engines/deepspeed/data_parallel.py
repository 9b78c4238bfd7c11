"""Data parallelism of a Hugging Face model, and the base class of DeepSpeed's ways to split such a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from kit.emit.run_directory import RunDirectory
from kit.engines.collective import from_own_place
from kit.engines.deepspeed.state import ParameterState
from kit.engines.deepspeed.strategy import ModelParallelStrategy
from kit.engines.deepspeed.whole_model import whole_model
from kit.engines.huggingface import experts
from kit.engines.huggingface.adapters import build_frozen, freeze_partitioned, trainable
from kit.engines.huggingface.buffers import SavedBuffers
from kit.engines.huggingface.models import random_model, source_for_model
from kit.engines.huggingface.random_weights import RandomWeights
from kit.engines.kernels.chunked_loss import ChunkedLoss
from kit.engines.kernels.prepare_model import prepare, summed_loss
from kit.engines.protocol import MicroBatch, StateKind, TensorShard, TensorSource

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DataParallel(ModelParallelStrategy):
    """Every rank computes samples of its own."""

    chunked: ChunkedLoss | None = None

    def __init__(self, rundir: RunDirectory) -> None:
        self.rundir = rundir
        self._spec = rundir.plan.model
        self.dp_rank, self.dp_size = dist.get_rank(), dist.get_world_size()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights: under autocast that of the master weights, which DeepSpeed clones from them."""
        plan = self.rundir.plan
        return torch.float32 if plan.layout.autocast else DTYPES[plan.job.precision]

    def build(self, settings: dict[str, Any]) -> torch.nn.Module:
        """Build the model. Stage 3 partitions each parameter as soon as it exists, so that no rank has a whole model.

        At stage 3 transformers initialises the model module by module on rank 0, in another order than at other stages:
        the random weights differ from those of the other stages.
        """
        layout, device = self.rundir.plan.layout, torch.device(get_accelerator().current_device_name())
        lora = self.rundir.plan.job.lora
        # bitsandbytes quantises whole weights, so deepspeed.initialize partitions the weights of QLoRA afterwards.
        partitioned = layout.zero_stage == 3 and not (lora and lora.four_bit)
        with _zero3_announced(settings, partitioned):
            if lora is not None and not partitioned:
                model = build_frozen(self.rundir, lora, device)
            elif partitioned:
                model = random_model(self._spec, self.rundir.run.seed, self.dtype, device)
            else:
                model = whole_model(self._spec, layout.zero_stage, self.dtype, device)
        if lora is not None and partitioned:
            freeze_partitioned(model, self.rundir, lora)
        self.chunked = prepare(model, self.rundir.plan, self.rundir.run.data.packing)
        return model

    def random_weights(self) -> TensorSource | None:
        """Masters are the fp32 values of the model's weights."""
        if self.rundir.plan.layout.zero_stage == 3:
            return None
        return RandomWeights(self.rundir, self.dtype, torch.device(self.engine.device))

    def attach(self, engine: deepspeed.DeepSpeedEngine, state: ParameterState) -> None:
        self.engine, self.state = engine, state
        # A tied parameter appears once, under its first name, which transformers saves.
        self.parameters = trainable(engine.module)
        # With adapters, buffers are loaded together with the frozen weights.
        self.buffers = SavedBuffers(
            torch.nn.Module() if self.rundir.plan.job.lora else engine.module, self.rundir.plan.model
        )

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        return summed_loss(self.engine, micro_batch, self.engine.device, self.chunked)

    @property
    def _replica(self) -> tuple[int, int]:
        """(number of this rank, number of ranks) of the ranks that have equal slices of the model."""
        return dist.get_rank(), dist.get_world_size()

    def export_blocks(self, kind: StateKind) -> Iterator[TensorShard]:
        """Each rank exports its own part. What all replicas have (gradients, which ZeRO gathers; stage 0) they export
        in turn."""
        gathered = kind is StateKind.GRADIENT
        (replica, replicas), items = self._replica, [*enumerate(self.parameters.items())]
        whole = gathered or self.rundir.plan.layout.zero_stage == 0
        for number, (name, parameter) in items if gathered else from_own_place(items):
            part = (0, self.state.gradient(parameter)) if gathered else self.state.own_part(parameter, kind)
            if not whole or number % replicas == replica:
                yield from self._own_blocks(kind, name, part[0], part[1].detach().flatten())
        if dist.get_rank() == 0:
            for name, buffer in self.buffers.export(kind):
                yield TensorShard.whole(kind, name, buffer)

    def _own_blocks(self, kind: StateKind, name: str, start: int, values: torch.Tensor) -> Iterator[TensorShard]:
        """Blocks of a range of the flattened parameter."""
        for block in experts.split_range(self._spec, name, self.shape(name), start, values):
            yield TensorShard(kind, *block)

    def load(self, kind: StateKind, source: TensorSource) -> None:
        """Raises CheckpointError if names or shapes differ from the model's."""
        shapes = {name: self.shape(name) for name in self.parameters}
        source = source_for_model(self._spec, source, shapes, self.buffers, kind)
        for name, parameter in self.parameters.items():
            self.load_param(name, parameter, kind, source)

    def load_param(self, name: str, parameter: torch.nn.Parameter, kind: StateKind, source: TensorSource) -> None:
        """Set this rank's part of one parameter from ``source``."""
        start, own = self.state.own_part(parameter, kind)
        self.state.set_part(parameter, kind, source.read_flat(name, start, own.numel()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole parameter, as transformers has it."""
        parameter = self.parameters[name]
        return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def _zero3_announced(settings: dict[str, Any], stage3: bool) -> Iterator[None]:
    """While entered at stage 3, transformers builds models under zero.Init, and gathers each module to initialise
    it."""
    # transformers keeps a weak reference: the name must stay bound until the model is built.
    announcement = HfDeepSpeedConfig(settings) if stage3 else None
    try:
        yield
    finally:
        del announcement
        unset_hf_deepspeed_config()
