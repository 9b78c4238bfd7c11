"""DeepSpeed behind kit's Engine protocol.

DeepSpeed averages gradients over data-parallel ranks in every stage (engine.py, allreduce_bucket;
stage_1_and_2.py, average_tensor; comm/coalesced_collectives.py, reduce_scatter_coalesced). If ranks split a sample, it
averages over other numbers (``averaged_over`` of ``strategy.py``). By default it also divides by the number of micro
batches; ``backward(scale_wrt_gas=False)`` does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from kit.emit.run_directory import RunDirectory
from kit.engines.collective import from_own_place
from kit.engines.deepspeed import grad_norm
from kit.engines.deepspeed.build import build_deepspeed, parameter_state, release
from kit.engines.hf_engine import HuggingFaceEngine
from kit.engines.huggingface.routing import HfRouting
from kit.engines.kernels.loss import evaluation_loss
from kit.engines.protocol import LossSum, MicroBatch, Norms, StateKind, TensorShard, TensorSource
from kit.errors import EngineError


class DeepSpeedEngine(HuggingFaceEngine):
    """ZeRO 0 to 3, configured by the run directory's ds_config.json. The plan's strategy builds the model.

    Weights are random from ``run.seed``, or read from ``run.model_path``. Raises EngineError if DeepSpeed built
    something else than the plan says.
    """

    def __init__(self, rundir: RunDirectory) -> None:
        self._rundir = rundir
        self.optimizer_name = rundir.plan.job.optimizer.name
        self._engine, self._strategy = build_deepspeed(rundir)
        self._state = parameter_state(self._engine)
        self._strategy.attach(self._engine, self._state)
        plan, self._device = rundir.plan, torch.device(self._engine.device)
        self._averaged_over, self._tokens_group = self._strategy.averaged_over, self._strategy.tokens_group
        self._routing = HfRouting(
            self._engine.module,
            plan.model,
            plan.job,
            self._strategy.dp_size,
            self._device,
            self._strategy.sequence_group,
        )
        self.dp_rank: int = self._strategy.dp_rank
        self.dp_size: int = self._strategy.dp_size
        self.is_main: bool = dist.get_rank() == 0
        self._steps = 0
        self._scaled_norm: torch.Tensor | float | None = None
        self._norm = math.nan
        """Norm of the current gradients after ``gradient_norm``; ``_scaled_norm`` is DeepSpeed's value, which includes
        fp16's loss scale."""
        self._start(rundir, self._strategy.random_weights)

    # ------------------------------------------------------------------ one optimizer step

    def _backward(self, micro_batch: MicroBatch, scale: torch.Tensor, is_last: bool) -> torch.Tensor:
        # At the boundary, stages 0 and 1 reduce the gradients, and stages 2 and 3, which have reduced them in each
        # backward, pass them to the optimizer.
        self._engine.set_gradient_accumulation_boundary(is_last)
        loss = self._strategy.loss_sum(micro_batch)
        self._engine.backward(loss * scale, scale_wrt_gas=False)
        return loss

    def _own_parts(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return [self._strategy.shard_batch(micro_batch) for micro_batch in micro_batches]

    def gradient_norm(self) -> float | None:
        if self._scaled_norm is None:
            self._scaled_norm = grad_norm.scaled_norm(self._engine)
            self._norm = grad_norm.unscaled_norm(self._scaled_norm, self._loss_scale)
        return None if self._engine.fp16_enabled() and not math.isfinite(self._norm) else self._norm

    def apply(self, learning_rate: float) -> Norms:
        """Raises EngineError if the norm is not finite, or if fp16's loss scale is already at its minimum."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self.gradient_norm()
        scale = self._loss_scale if self._engine.fp16_enabled() else None
        if norm is not None and not math.isfinite(norm):
            raise EngineError(
                f"gradient norm {norm} at optimizer step {self.optimizer_steps + 1}; no weight has changed: discard "
                "this step, or resume before it with a lower learning rate"
            )
        with grad_norm.precomputed_norm(self._engine, self._scaled_norm):
            self._step(scale)
        self._pending, self._scaled_norm = False, None
        if norm is None:  # DeepSpeed has lowered the loss scale
            return Norms(gradient=math.inf, skipped=True, loss_scale=scale)
        if not self._engine.was_step_applied():
            raise EngineError(f"DeepSpeed skipped a step whose gradient norm is {norm}; look for its reason in the log")
        self._steps += 1
        return Norms(gradient=norm, loss_scale=scale)

    def _step(self, scale: float | None) -> None:
        try:
            self._engine.step()
        except Exception as error:
            if scale is None or "loss scale already at minimum" not in str(error):  # fp16/loss_scaler.py, update_scale
                raise
            raise EngineError(
                f"gradients overflow at optimizer step {self.optimizer_steps + 1} though fp16's loss scale is at its "
                f"minimum of {scale:g}; use precision=bf16, or a lower learning rate from an earlier checkpoint"
            ) from error

    def discard(self) -> None:
        self._state.clear_gradients()
        self._pending, self._scaled_norm = False, None

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        loss_of, own = self._strategy.loss_sum, self._own_parts(micro_batches)
        return evaluation_loss(self._engine, loss_of, own, self._device, self._tokens_group)

    # ------------------------------------------------------------------ state

    def export_blocks(self, kinds: Sequence[StateKind]) -> Iterator[TensorShard]:
        """Not collective, except for gradients, which are exported without fp16's loss scale."""
        for kind in from_own_place(kinds):
            if kind not in (StateKind.MASTER, StateKind.GRADIENT):
                self._state.create_moments()
            unscaled = 1 / self._loss_scale if kind is StateKind.GRADIENT else 1
            try:
                for block in self._strategy.export_blocks(kind):
                    yield block if unscaled == 1 else replace(block, values=block.values * unscaled)
            finally:
                self._state.release_buffers()

    def import_state(self, kind: StateKind, source: TensorSource) -> None:
        """Raises CheckpointError if names or shapes differ from the model's, EngineError for gradients."""
        if kind is StateKind.GRADIENT:
            raise EngineError("gradients can be exported, not imported; import master, exp_avg or exp_avg_sq")
        if kind is not StateKind.MASTER:
            self._state.create_moments()
        self._strategy.load(kind, source)
        self._state.release_buffers()
        if kind is StateKind.MASTER:
            self._state.update_model()

    @property
    def optimizer_steps(self) -> int:
        return self._steps

    def set_optimizer_steps(self, steps: int) -> None:
        self._state.set_optimizer_steps(steps)
        self._steps = steps

    def scalars(self) -> Mapping[str, float]:
        """fp16's loss scale and what moves it, and DeepSpeed's own step counts."""
        found = ((f"{kind}.{name}", getattr(holder, name, None)) for kind, holder, name in self._scalars())
        return {name: value for name, value in found if value is not None}

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        for kind, holder, name in self._scalars():
            if f"{kind}.{name}" in scalars:
                setattr(holder, name, scalars[f"{kind}.{name}"])

    def _scalars(self) -> Iterator[tuple[str, Any, str]]:
        """(kind, object, its attribute)."""
        for name in ("global_steps", "global_samples", "skipped_steps"):
            yield "deepspeed", self._engine, name
        if self._engine.fp16_enabled():
            optimizer = self._engine.optimizer  # ZeRO's has a loss scaler, that of stage 0 is one
            for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
                yield "loss_scale", getattr(optimizer, "loss_scaler", optimizer), name

    def private_tensors(self) -> Mapping[str, torch.Tensor]:
        return self._state.private_tensors()

    def modules(self) -> Mapping[str, torch.nn.Module]:
        return dict(self._engine.module.named_modules())

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by kind. Includes offloaded tensors, and excludes parameters that stage 3 gathers for a moment."""
        return self._state.memory_bytes()

    def close(self) -> None:
        release(self._engine, self._strategy, self._rundir)

    # ------------------------------------------------------------------ helpers

    @property
    def _loss_scale(self) -> float:
        return float(self._engine.optimizer.loss_scale) if self._engine.fp16_enabled() else 1.0
