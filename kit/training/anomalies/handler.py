"""Reacts to an anomalous step: warns, discards the batch, rewinds to a checkpoint, or stops the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kit.engines.collective import gather
from kit.engines.protocol import Engine, MicroBatch
from kit.errors import EngineError
from kit.specs.run import StabilitySpec
from kit.training.anomalies.spikes import APPLIES_STEP, SpikeDetector, StepDecision
from kit.training.checkpoint.manager import CheckpointManager
from kit.training.counters import Counters
from kit.training.logging.run_logger import RunLogger


class AnomalyHandler:
    """Judges every step's loss and gradient norm, and carries out the decision. Decisions are equal on all ranks."""

    def __init__(
        self,
        engine: Engine,
        spec: StabilitySpec,
        checkpoints: CheckpointManager,
        logger: RunLogger,
        beat: Callable[[str, float], None],
        step: int,
    ) -> None:
        """Collective. ``beat``: called before long work (``Watchdog.beat``). ``step``: the last finished step. Reads
        loss and norm of this step and the steps before it from the log."""
        self._engine, self._spec, self._checkpoints = engine, spec, checkpoints
        self._logger, self._beat = logger, beat
        self.detector = SpikeDetector(spec)
        """``record`` every step that changed the weights; later steps are compared with them."""
        self.detector.reset(logger.history(step, spec.window_steps))
        self._rewinds: dict[int, int] = {}

    def judge(self, loss: float) -> StepDecision:
        """Collective. Call before the optimizer step. Judges the loss, and then the gradient norm unless the loss
        already prevents the step."""
        of_loss = self.detector.check_loss(loss)
        if of_loss.action not in APPLIES_STEP:
            return of_loss
        norm = self._engine.gradient_norm()
        if norm is None:  # an fp16 overflow: the engine lowers the loss scale
            return of_loss
        of_norm = self.detector.check_norm(norm)
        return of_loss if of_loss and of_norm.action in APPLIES_STEP else of_norm

    def handle(
        self, decision: StepDecision, before: Counters, after: Counters, batch: Sequence[MicroBatch]
    ) -> Counters | None:
        """Collective. Carry out a decision before the optimizer step. Returns the counters to continue from after a
        rewind; None: continue from ``after``.

        ``before``, ``after``: counters before and after the step. Discards the step's gradients unless the decision
        allows the step. Raises EngineError if the run must end: for values that are not finite, or if no rewind is
        possible.
        """
        last = after.position - 1
        self._logger.log_event(
            decision.kind, after.step, action=decision.action, why=decision.why, samples=[before.position, last]
        )
        if decision.kind == "not finite":
            culprit = first_module(self._engine, batch)
            self._logger.log_event("not finite", after.step, first=culprit)
            if decision.action == "stop":
                raise EngineError(
                    f"{decision.why} at step {after.step}; resume from the last checkpoint with a lower learning_rate "
                    f"or a smaller grad_clip, and look at samples {before.position} to {last} of that step: {culprit}"
                )
        where = f"step {after.step} (samples {before.position} to {last})"
        self._logger.log(f"{decision.kind} at {where}: {decision.why}; {_CONSEQUENCES[decision.action]}")
        if decision.action in APPLIES_STEP:
            return None
        self._engine.discard()
        return self._rewind(decision, after) if decision.action == "rewind" else None

    def _rewind(self, decision: StepDecision, after: Counters) -> Counters:
        """Load the last checkpoint, and continue with the data after the anomalous step. Returns the counters."""
        self._beat(f"rewinding from step {after.step}", 10)
        self._checkpoints.wait()
        counters = self._checkpoints.kept.load_newest(self._engine)
        if counters is None:
            raise EngineError(
                f"{decision.why} at step {after.step}, and there is no checkpoint to go back to yet; lower the "
                f"learning_rate, or save more often (run.checkpoint.every_steps)"
            )
        times = self._rewinds[counters.step] = self._rewinds.get(counters.step, 0) + 1
        limit = self._spec.max_rewinds
        if times > limit:
            raise EngineError(
                f"{decision.why} at step {after.step}, after {limit} rewinds to step {counters.step} "
                f"(run.stability.max_rewinds); other data does not help: lower the learning_rate"
            )
        skipped = [counters.position, after.position - 1]
        counters = dataclasses.replace(counters, samples_skipped=after.position - counters.samples_seen)
        self._logger.log_event("rewound", counters.step, from_step=after.step, skipped_samples=skipped)
        self._logger.log(f"back to step {counters.step}; samples {skipped[0]} to {skipped[1]} are left out")
        self._logger.rewind(counters.step)
        self.detector.reset(self._logger.history(counters.step, self._spec.window_steps))
        return counters


_CONSEQUENCES = {
    "warn": "the run goes on",
    "discard": "the batch is left out",
    "rewind": "going back to the last checkpoint",
    "stop": "the run ends",
}


def first_module(engine: Engine, micro_batches: Sequence[MicroBatch]) -> str:
    """Collective. Repeat a step and discard its gradients; returns, in words, the first module with values that are not
    finite.

    Checks each module in the order of execution: output, with inputs and weights as possible causes; then, in backward,
    the gradient of the output. Every rank checks its own modules; the lowest rank with a result wins.
    """
    found: list[str] = []
    engine.discard()
    with ExitStack() as hooks:
        hooks.callback(engine.discard)
        for name, module in engine.modules().items():
            if next(module.children(), None) is None:  # leaves only: a container returns a leaf's output
                hooks.enter_context(module.register_forward_hook(partial(_look_at_output, name, found)))
        engine.forward_backward(micro_batches)
    told = [(rank, words[0]) for rank, words in enumerate(gather(found)) if words]
    return f"{told[0][1]} (rank {told[0][0]})" if told else "a replay of the step was finite everywhere"


def _look_at_output(name: str, found: list[str], module: torch.nn.Module, inputs: Any, output: Any) -> None:
    for tensor in _tensors(output):
        if not found and not _is_finite(tensor):
            found.append(f"the output of {name} ({type(module).__name__}) is not finite, {_because(module, inputs)}")
        if tensor.requires_grad and not found:
            tensor.register_hook(partial(_look_at_gradient, f"{name} ({type(module).__name__})", found))


def _look_at_gradient(of: str, found: list[str], gradient: torch.Tensor) -> None:
    if not found and not _is_finite(gradient):
        found.append(f"in backward the gradient at the output of {of} is not finite")


def _because(module: torch.nn.Module, inputs: Any) -> str:
    broken = [name for name, parameter in module.named_parameters(recurse=False) if not _is_finite(parameter)]
    if broken:
        return f"and neither is its {broken[0]}"
    if not all(map(_is_finite, _tensors(inputs))):
        return "and neither is its input"
    if any(parameter.numel() == 0 for parameter in module.parameters(recurse=False)):
        return "though its inputs are"  # ZeRO-3 has freed the weights
    return "though its inputs and weights are"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
