"""Plain torch on a Hugging Face model: one device, DDP (zero_stage 0), or FSDP2 (zero_stage 2 and 3).

Parameters are fp32 and are the master weights. precision=fp32 computes in fp32. bf16 autocasts the forward pass; under
FSDP2 it gathers parameters in bf16 instead. fp8 is bf16 with the GEMMs of linear layers in 8 bits. With
optimizer_state_dtype=bf16 parameters are bf16, and so are their gradients and moments.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from kit.emit.run_directory import RunDirectory
from kit.engines.collective import from_own_place
from kit.engines.hf_engine import HuggingFaceEngine
from kit.engines.huggingface import experts
from kit.engines.huggingface.adapters import (
    FrozenWeights,
    build_frozen,
    frozen_skeleton,
    scale_bytes,
    trainable,
)
from kit.engines.huggingface.buffers import SavedBuffers
from kit.engines.huggingface.models import build_skeleton, random_model, source_for_model
from kit.engines.huggingface.random_weights import RandomWeights
from kit.engines.huggingface.routing import HfRouting
from kit.engines.kernels.compiled_blocks import choose_attention
from kit.engines.kernels.fp8 import convert
from kit.engines.kernels.loss import evaluation_loss
from kit.engines.kernels.prepare_model import prepare, summed_loss
from kit.engines.protocol import (
    LossSum,
    MicroBatch,
    Norms,
    StateKind,
    TensorShard,
    TensorSource,
    as_matrix,
)
from kit.engines.torch.context_parallel import ContextParallel
from kit.engines.torch.ddp import Compression, DdpModel
from kit.engines.torch.fsdp import (
    FsdpModel,
    build_mesh,
    is_first_replica,
    keep_gradients_in_bf16,
    local_shard,
    own_box,
    own_slice,
    read_own,
)
from kit.engines.torch.optimizer import Optimizer, vocabulary
from kit.engines.torch.stochastic_rounding import Rounding
from kit.errors import EngineError


class TorchEngine(HuggingFaceEngine):
    """Plain torch: one process, DDP or FSDP2. Initialise torch.distributed before, also for one process."""

    def __init__(self, rundir: RunDirectory) -> None:
        plan = rundir.plan
        self._rank = dist.get_rank()
        self.is_main = self._rank == 0
        self._device = _device(plan.cluster.gpu.device)
        self._spec = plan.model
        self._grad_clip = plan.job.grad_clip
        self._lora = plan.job.lora
        self.optimizer_name = plan.job.optimizer.name
        load = None
        if self._lora is None and plan.layout.zero_stage == 0:
            self._model = random_model(self._spec, rundir.run.seed, device=self._device)
        elif self._lora is None:
            # With FSDP2 no rank has the whole model: ``import_state`` sets each weight.
            self._model = build_skeleton(self._spec, self._device)
        elif plan.layout.zero_stage == 0:
            self._model = build_frozen(rundir, self._lora, self._device)
        else:
            if self._lora.four_bit and torch.__version__ < "2.13":
                raise EngineError(
                    f"job.lora.four_bit with FSDP2 needs torch 2.13 or newer, which shards tensors of whole numbers; "
                    f"this is {torch.__version__}: use zero_stage=0, or engine=deepspeed"
                )
            self._model = frozen_skeleton(rundir, self._lora, self._device)
            # Each layer is loaded and sharded alone; but tensor parallelism splits a whole model.
            place = self._device if plan.layout.tp == 1 else torch.device("cpu")
            load = FrozenWeights(self._model, rundir, place).load
        short = plan.layout.optimizer_state_dtype == "bf16"
        if short:
            for parameter in self._model.parameters():  # buffers stay as they are, RoPE's frequencies among them
                parameter.data = parameter.data.to(torch.bfloat16)
        if plan.job.precision == "fp8":
            # Rows have different lengths in every objective except pretraining.
            convert(self._model, emulated=self._device.type == "cpu", ragged=plan.job.objective != "pretrain")
        self._chunked = prepare(self._model, plan, rundir.run.data.packing)
        self._context = ContextParallel(self._model, plan.layout) if plan.layout.cp > 1 else None
        group = None if self._context is None else self._context.group
        self._routing = HfRouting(self._model, plan.model, plan.job, plan.layout.dp, self._device, group)
        choose_attention(plan.layout.attention_kernel)
        bf16 = torch.bfloat16 if plan.job.precision in ("bf16", "fp8") else None
        # The run's worker has counted the steps; without it those of a run of full sequences.
        steps = rundir.run.steps or (plan.job.total_tokens or 0) // plan.job.tokens_per_step
        self._compression = Compression(plan.layout.gradient_compression, steps)
        self._parallel: DdpModel | FsdpModel
        if plan.layout.zero_stage == 0:
            self._parallel = DdpModel(self._model, plan.layout.dp, self._compression)
            self._autocast_dtype, self._tp_rank = None if short else bf16, 0
        else:
            mesh = build_mesh(self._device, plan.layout.tp)
            offload = plan.layout.offload_param != "none"
            stage, cp, ep = plan.layout.zero_stage, plan.layout.cp, plan.layout.ep
            self._parallel = FsdpModel(self._model, stage, bf16, self._device, mesh, offload, load, cp, ep)
            self._autocast_dtype, self._tp_rank = None, mesh.get_local_rank("tp")
        self.dp_rank, self.dp_size = self._parallel.dp_rank, self._parallel.dp_size
        self._averaged_over, self._tokens_group = self._parallel.averaged_over, self._parallel.tokens_group
        self._parameters = trainable(self._model)  # a tied parameter once, as transformers saves it
        if plan.layout.gradient_dtype == "bf16":
            keep_gradients_in_bf16(self._parameters.values())
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        self._buffers = SavedBuffers(self._model if self._lora is None else torch.nn.Module(), rundir.plan.model)
        self._norm: torch.Tensor | None = None
        """Norm of the current gradients, a scalar on the device."""
        self._optimizer = Optimizer(
            self._parameters.values(),
            plan.job.optimizer,
            plan.job.learning_rate,
            vocabulary(self._model),
            bf16 or torch.float32,
            # Replicas draw the same numbers, and each shard its own.
            Rounding(rundir.run.seed, dist.get_rank() if plan.layout.zero_stage else 0, self._device)
            if plan.layout.bf16_stochastic_round
            else None,
        )
        sharded = plan.layout.zero_stage > 0
        self._start(rundir, lambda: RandomWeights(rundir, torch.float32, self._device) if sharded else None)

    def _backward(self, micro_batch: MicroBatch, scale: torch.Tensor, is_last: bool) -> torch.Tensor:
        with self._parallel.micro_batch(is_last):
            loss = self._loss(micro_batch)
            (loss * scale).backward()
        return loss

    def _beside_loss(self) -> tuple[torch.Tensor, ...]:
        self._norm = self._parallel.norm(each.grad for each in self._parameters.values() if each.grad is not None)
        return (self._norm,)

    def apply(self, learning_rate: float) -> Norms:
        norm, known = self._gradient_norm()
        coefficient = None
        if self._grad_clip > 0:
            # The formula of clip_grad_norm_. Slices are scaled one by one, because they may be on different meshes.
            coefficient = torch.clamp(self._grad_clip / (norm + 1e-6), max=1.0)
            for parameter in self._parameters.values():
                if parameter.grad is not None and not self._optimizer.casts(parameter):
                    local_shard(parameter.grad).mul_(coefficient)
        self._optimizer.step(learning_rate, coefficient)
        self.discard()
        return Norms(gradient=known)

    def discard(self) -> None:
        self._pending, self._norm = False, None
        self._optimizer.zero_grad()

    def gradient_norm(self) -> float:
        """The norm; ``forward_backward`` has copied it to the host together with the loss."""
        return self._gradient_norm()[1]

    def _gradient_norm(self) -> tuple[torch.Tensor, float]:
        if self._norm is None:
            raise EngineError("no gradients are there; call forward_backward before apply")
        return self._norm, self._on_host[0]

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Raises EngineError if all labels are masked."""
        loss_of, own = partial(self._loss, training=False), self._own_parts(micro_batches)
        return evaluation_loss(self._model, loss_of, own, self._device, self._tokens_group)

    def _own_parts(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return micro_batches if self._context is None else [*map(self._context.shard_batch, micro_batches)]

    def export_blocks(self, kinds: Sequence[StateKind]) -> Iterator[TensorShard]:
        """Not collective: each rank exports what it holds, and of replicas one."""
        own_parameters = [
            item for number, item in enumerate(self._parameters.items()) if self._exports(number, item[1])
        ]

        def by_columns(item: tuple[StateKind, tuple[str, torch.nn.Parameter]]) -> bool:
            parameter = item[1][1]
            return own_box(parameter)[0][1:] != parameter.shape[1:]

        for kind, (name, parameter) in from_own_place([*itertools.product(kinds, own_parameters)], by_columns):
            state, (_, starts) = self._state(kind, name).detach(), own_box(parameter)
            own = local_shard(state) if isinstance(state, DTensor) else own_slice(parameter, state)
            for on_disk, shape, (row, *columns), part in experts.split_part(
                self._spec, name, self._shapes[name], starts, own
            ):
                if part.numel():
                    yield TensorShard(kind, on_disk, shape, row, columns[0] if columns else 0, as_matrix(part))
        for kind in kinds if self.is_main else ():
            for name, tensor in self._buffers.export(kind):
                yield TensorShard.whole(kind, name, tensor)

    def _exports(self, number: int, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank exports its part of parameter ``number``."""
        if isinstance(parameter, DTensor):
            return is_first_replica(parameter, self._tp_rank)
        return number % dist.get_world_size() == self._rank

    @torch.no_grad()
    def import_state(self, kind: StateKind, source: TensorSource) -> None:
        """Each rank reads its part. Raises CheckpointError for missing or unknown names and for wrong shapes."""
        source = source_for_model(self._spec, source, self._shapes, self._buffers, kind)
        for name, parameter in self._parameters.items():
            target = self._state(kind, name)
            local_shard(target).copy_(read_own(target, source, name))
            if kind is not StateKind.MASTER:
                self._optimizer.store_moment(kind, parameter, target)

    def private_tensors(self) -> Mapping[str, torch.Tensor]:
        """8-bit codes and scales, and Adafactor's means of rows and columns."""
        return {
            f"{key}.{name}": tensor
            for name, parameter in self._parameters.items()
            for key, tensor in self._optimizer.private_state(parameter).items()
        }

    @property
    def optimizer_steps(self) -> int:
        return self._optimizer.steps

    def set_optimizer_steps(self, steps: int) -> None:
        self._optimizer.set_steps(steps)
        self._compression.resume_at(steps)

    def modules(self) -> Mapping[str, torch.nn.Module]:
        return dict(self._model.named_modules())

    def memory_bytes(self) -> dict[str, int]:
        def num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
            return sum(local_shard(tensor).nbytes for tensor in tensors if tensor is not None)

        parameters = list(self._parameters.values())
        return {
            "weights": num_bytes(self._model.parameters()) + scale_bytes(self._model),
            "gradients": num_bytes(parameter.grad for parameter in parameters),
            "optimizer": sum(tensor.nbytes for tensor in self._optimizer.moments()),
        }

    def close(self) -> None:
        """Release DDP and FSDP2, which keep references to the process group."""
        del self._parallel

    def _loss(self, micro_batch: MicroBatch, training: bool = True) -> torch.Tensor:
        casting = torch.autocast(self._device.type, self._autocast_dtype, enabled=self._autocast_dtype is not None)
        with casting:
            return summed_loss(self._parallel.module(training), micro_batch, self._device, self._chunked)

    def _state(self, kind: StateKind, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        match kind:
            case StateKind.MASTER:
                return parameter
            case StateKind.GRADIENT:
                if parameter.grad is None:
                    raise EngineError(f"{name} has no gradient; export gradients between forward_backward and apply")
                return parameter.grad
            case _:
                return self._optimizer.moment(kind, parameter)


def _device(kind: str) -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
