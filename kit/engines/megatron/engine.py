"""The Megatron engine: megatron-core's parallel groups, GPTModel, schedules and optimizers behind ``Engine``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from kit.emit.run_directory import RunDirectory
from kit.engines.huggingface.adapters import InitialAdapters, adapter_shapes, frozen_weights
from kit.engines.huggingface.models import HfDirectory
from kit.engines.kernels.loss import sums_by_set
from kit.engines.megatron.chunks import distributed_chunks
from kit.engines.megatron.microbatches import forward, length_unit, pad_to_longest, pad_to_whole_rounds
from kit.engines.megatron.model.build import transformer_config
from kit.engines.megatron.muon import mark_matrices
from kit.engines.megatron.optimizer import build_optimizer, optimizer_config
from kit.engines.megatron.prediction_heads import PredictionHeads
from kit.engines.megatron.resharding.export import export_blocks
from kit.engines.megatron.resharding.groups import frozen_groups, shard_groups
from kit.engines.megatron.resharding.huggingface import HfResharder
from kit.engines.megatron.resharding.optimizer_state import LocalState
from kit.engines.megatron.routing import MegatronRouting
from kit.engines.megatron.weights.adapters import adapter_params
from kit.engines.megatron.weights.random import RandomSource
from kit.engines.protocol import Engine, LossSum, MicroBatch, Norms, StateKind, TensorShard, TensorSource
from kit.errors import EngineError


class MegatronEngine(Engine):
    """``Engine`` with tensor, sequence, pipeline, context, expert and data parallelism."""

    def __init__(self, rundir: RunDirectory) -> None:
        plan, settings = rundir.plan, rundir.settings
        for only_megatron_lm, why, otherwise in (
            (
                settings["transformer_config"].get("overlap_moe_expert_parallel_comm"),
                "transformer_config.overlap_moe_expert_parallel_comm=true: kit's worker has no schedule that runs two "
                "micro batches beside each other",
                "remove the key",
            ),
            (
                plan.layout.optimizer_state_dtype != "fp32",
                f"layout.optimizer_state_dtype={plan.layout.optimizer_state_dtype}: Megatron's precision-aware "
                "optimizer is Transformer Engine's, which kit's worker does not step",
                "use fp32",
            ),
            (
                plan.layout.fp8_param_gather,
                "layout.fp8_param_gather=true: kit's worker reads and writes master weights beside bf16 weights",
                "use false",
            ),
        ):
            if only_megatron_lm:
                raise EngineError(f"{why}; start Megatron-LM by pretrain_gpt.sh, or {otherwise}")
        self.optimizer_name = plan.job.optimizer.name
        parallel_state.initialize_model_parallel(**settings["parallel_state"])
        model_parallel_cuda_manual_seed(rundir.run.seed)
        self._config = transformer_config(settings["transformer_config"])
        ddp_config = DistributedDataParallelConfig(**settings["distributed_data_parallel"])
        adapters = {} if plan.job.lora is None else adapter_shapes(plan.model, plan.job.lora)
        self._chunks = distributed_chunks(plan, self._config, ddp_config, settings["model"], adapters)
        self._routing = MegatronRouting(plan.model, self._config, self._chunks)
        self._prediction_heads = PredictionHeads(self._config)
        self._optimizer = build_optimizer(optimizer_config(settings["optimizer"]), self._chunks)
        self._norm: float | None = None
        """Norm of the current gradients; None before ``gradient_norm``."""
        self._config.finalize_model_grads_func = finalize_model_grads
        if ddp_config.overlap_grad_reduce:
            # Reduce gradients during backward of the last micro batch only, as megatron.training does.
            no_sync, start_sync = zip(*((chunk.no_sync, chunk.start_grad_sync) for chunk in self._chunks), strict=True)
            self._config.no_sync_func = list(no_sync) if len(no_sync) > 1 else no_sync[0]
            self._config.grad_sync_func = list(start_sync) if len(start_sync) > 1 else start_sync[0]

        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.is_main = dist.get_rank() == 0
        self._run_schedule = get_forward_backward_func()
        dense, experts = shard_groups(self._optimizer)
        self._states = {groups.state for groups in (dense, experts) if isinstance(groups.state, LocalState)}
        path, source = rundir.run.model_path, RandomSource(plan.model, rundir.run.seed)
        resharder = partial(HfResharder, plan.model, self._config, self._chunks)
        if plan.job.lora is not None:
            resharder(*frozen_groups()).load(StateKind.MASTER, frozen_weights(rundir))
            self._resharder = resharder(dense, experts, (adapter_params(plan.model, adapters), adapters))
            self.import_state(StateKind.MASTER, InitialAdapters(adapters, rundir.run.seed))
        else:
            self._resharder = resharder(dense, experts)
            whole = source if path is None else HfDirectory(path, plan.model.mtp_num_layers)
            self.import_state(StateKind.MASTER, whole)
        if self.optimizer_name == "muon":
            mark_matrices(self._resharder)

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Compute loss and gradients of one optimizer step. On return, gradients are reduced over the data-parallel
        ranks and divided by the number of tokens."""
        for chunk in self._chunks:
            chunk.train()
        self.discard()
        scale = self._routing.begin(micro_batches)
        self._prediction_heads.begin(scale)
        total = self._run(micro_batches, forward_only=False, divisor=scale)
        self._routing.end(len(micro_batches))
        self._prediction_heads.end(len(micro_batches))
        return total

    def routing_metrics(self) -> Mapping[str, float | None]:
        return {**self._routing.metrics(), **self._prediction_heads.metrics()}

    def gradient_norm(self) -> float:
        """Compute the norm by the first two parts of megatron-core's step (optimizer.py, ``ChainedOptimizer.step``).
        ``step`` runs them again without harm: they copy gradients to the master weights."""
        if self._norm is None:
            overflowed = self._optimizer.prepare_grads()
            assert not overflowed, "only fp16 may overflow"
            self._norm = float(self._optimizer.get_grad_norm())
        return self._norm

    def apply(self, learning_rate: float) -> Norms:
        """Clip the gradients, step at this learning rate, clear the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self.gradient_norm()
        self._optimizer.get_grad_norm = lambda: norm  # step() would compute the norm again
        try:
            stepped, _, _ = self._optimizer.step()
        finally:
            del self._optimizer.get_grad_norm
        assert stepped, "only fp16 may skip a step"
        self.discard()
        return Norms(gradient=norm)

    def discard(self) -> None:
        """Clear the gradients without an optimizer step."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._norm = None

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Compute the loss without gradients."""
        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad():
            return self._run(pad_to_whole_rounds(micro_batches, self._config), forward_only=True)

    def export_blocks(self, kinds: Sequence[StateKind]) -> Iterator[TensorShard]:
        """Blocks of the full tensors. Not collective."""
        return export_blocks(self._resharder, kinds)

    def import_state(self, kind: StateKind, source: TensorSource) -> None:
        """Set one kind of state (not the gradient) from full tensors."""
        self._resharder.load(kind, source)

    @property
    def optimizer_steps(self) -> int:
        """Adam's step count. Muon has none, and keeps the one that it was given."""
        return max(int(group.get("step", 0)) for group in self._optimizer.param_groups)

    def set_optimizer_steps(self, steps: int) -> None:
        """Set Adam's step count."""
        for group in self._optimizer.param_groups:
            group["step"] = steps

    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Name → module. With an interleaved pipeline, names begin with the number of the model chunk."""
        if len(self._chunks) == 1:
            return dict(self._chunks[0].module.named_modules())
        return {
            f"chunk {index}: {name}": module
            for index, chunk in enumerate(self._chunks)
            for name, module in chunk.module.named_modules()
        }

    def memory_bytes(self) -> dict[str, int]:
        buffers = [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        return {
            "weights": sum(param.nbytes for chunk in self._chunks for param in chunk.parameters()),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": sum(state.memory_bytes() for state in self._states),
        }

    def close(self) -> None:
        """Release the model, and destroy megatron-core's process groups."""
        del self._resharder, self._states, self._optimizer, self._chunks
        parallel_state.destroy_model_parallel()

    def _run(
        self, micro_batches: Sequence[MicroBatch], forward_only: bool, divisor: torch.Tensor | None = None
    ) -> LossSum:
        micro_batches = pad_to_longest(micro_batches, length_unit(self._config))
        micro_batch_size, seq_length = micro_batches[0].input_ids.shape
        results = self._run_schedule(
            forward_step_func=partial(_forward_step, divisor),
            data_iterator=[iter(micro_batches) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(micro_batches),
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )
        # All-reduce the losses of this rank's micro batches. Only the last pipeline stage has losses.
        self.set_sums = sums_by_set(zip(micro_batches, (result["sums"] for result in results), strict=False))
        total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        for result in results:
            total += result["sums"]
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.broadcast(
            total,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        loss_sum, tokens = total.tolist()
        return LossSum(loss_sum=loss_sum, tokens=int(tokens))


def _forward_step(
    divisor: torch.Tensor | None, micro_batches: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Run one micro batch through one model chunk (``forward_step_func`` of pipeline_parallel/schedules.py)."""
    output, counted = forward(model, next(micro_batches))
    return output, partial(_sum_loss, divisor, counted)


def _sum_loss(
    divisor: torch.Tensor | None, counted: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(summed loss, tokens, dict that the schedule returns). megatron-core would scale the loss if this returned two
    values."""
    loss_sum = (losses * counted).sum()
    tokens = counted.sum()
    sums = torch.stack([loss_sum.detach().double(), tokens.double()])  # a copy: megatron-core divides the loss in place
    if divisor is not None:
        loss_sum = loss_sum / divisor
    return loss_sum, tokens.int(), {"sums": sums}
