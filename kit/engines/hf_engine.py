"""What the engines of Hugging Face models share: the weights that a run begins with, and the loss and gradients of a
step.

torch and DeepSpeed average gradients over ranks. What goes backward is (sum of the micro batch's loss) · (ranks of the
average) / (tokens over all ranks and micro batches): the first factor cancels the average, so the gradient is that of
the mean loss over all tokens of the step, for any layout.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from kit.emit.run_directory import RunDirectory
from kit.engines.huggingface.adapters import checkpoint_shapes, initial_adapters
from kit.engines.huggingface.loaded import hf_weights
from kit.engines.huggingface.routing import HfRouting
from kit.engines.kernels.loss import counted_loss, global_tokens, mean_scale, sums_by_set, to_host
from kit.engines.protocol import Engine, LossSum, MicroBatch, StateKind, TensorSource
from kit.errors import EngineError


class HuggingFaceEngine(Engine):
    """A subclass says how one micro batch goes backward, and over which ranks."""

    _device: torch.device
    _routing: HfRouting
    _averaged_over: int
    """Ranks over which gradients are averaged."""
    _tokens_group: dist.ProcessGroup | None
    """Ranks that together have every token of the step once; None: all ranks."""
    _pending = False
    """Whether gradients wait for ``apply`` or ``discard``, which set it to False."""
    _on_host: Sequence[float] = ()
    """The values of ``_beside_loss``."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """The host waits for the device once. Raises EngineError if all labels of the step are masked, or if an earlier
        step still has gradients."""
        if self._pending:
            raise EngineError("gradients of an earlier step are present; call apply or discard before the next step")
        micro_batches = self._own_parts(micro_batches)
        tokens = global_tokens(micro_batches, self._device, self._tokens_group)
        self._pending = True
        scale = mean_scale(tokens, self._averaged_over)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        found: list[tuple[MicroBatch, torch.Tensor]] = []
        self._routing.begin(len(micro_batches), self._averaged_over, self._loss_scale)
        for index, micro_batch in enumerate(micro_batches):
            self._routing.sequences = len(micro_batch.input_ids)
            loss = self._backward(micro_batch, scale, is_last=index == len(micro_batches) - 1)
            loss_sum += loss.detach()
            if micro_batch.data_set is not None:
                found.append((micro_batch, counted_loss(loss, micro_batch)))
        self._routing.end()
        dist.all_reduce(loss_sum, group=self._tokens_group)
        try:
            total, self._on_host = to_host(loss_sum, tokens, *self._beside_loss())
        except EngineError:
            self.discard()
            raise
        self.set_sums = sums_by_set(found)
        return total

    @abstractmethod
    def _backward(self, micro_batch: MicroBatch, scale: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Forward of ``_own_parts``, and backward of its summed loss times ``scale``. Returns the summed loss."""

    @abstractmethod
    def _own_parts(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """What this rank computes of micro batches of its data-parallel group."""

    @property
    def _loss_scale(self) -> float:
        """Factor on loss and gradients: fp16's loss scale, otherwise 1."""
        return 1.0

    def _beside_loss(self) -> tuple[torch.Tensor, ...]:
        """Scalars of the step that are copied to the host together with its loss."""
        return ()

    def routing_metrics(self) -> Mapping[str, float | None]:
        return self._routing.metrics()

    def _start(self, rundir: RunDirectory, random: Callable[[], TensorSource | None]) -> None:
        """Set the weights that the run begins with: adapters, those of ``run.model_path``, or ``random`` ones, which
        are None where the model has them."""
        plan, path = rundir.plan, rundir.run.model_path
        if plan.job.lora is not None:  # the frozen weights are there
            source: TensorSource | None = initial_adapters(rundir, checkpoint_shapes(plan.model, plan.job.lora))
        else:
            source = random() if path is None else hf_weights(plan.model, path)
        if source is not None:
            self.import_state(StateKind.MASTER, source)
