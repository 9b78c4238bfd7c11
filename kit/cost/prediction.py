"""Predictions for one layout: memory, time and cost, each by component."""

from __future__ import annotations

import math
from dataclasses import field

from kit.specs.validation import Text, stored
from kit.units import SECONDS_PER_DAY


@stored
class StageMemory:
    """Peak memory of one GPU of one pipeline stage, GiB by component."""

    stage: int
    """Pipeline stage, from 0."""
    components_gib: dict[Text, float]
    """weights, gradients, optimizer, activations, logits, buffers, overhead."""
    phases_gib: dict[Text, float] = field(default_factory=dict)
    """Peak of load, forward, backward, step and save."""

    @property
    def peak_gib(self) -> float:
        """Sum of the components."""
        return sum(self.components_gib.values())


@stored
class Operation:
    """A run beside its steps: checkpoints and failures."""

    checkpoint_gb: float
    """Weights and optimizer state."""
    checkpoint_s: float
    """Time to write one, all nodes at once, while training waits."""
    checkpoint_interval_s: float
    """Interval that loses the least time to checkpoints and failures together."""
    hours_between_failures: float
    """Mean time between failures of the whole cluster."""
    goodput: float
    """Share of the wall time that is left for training after checkpoints and failures."""
    data_mbytes_per_s: float
    """Tokens read, over all ranks."""
    checkpoint_usd_per_month: float
    """Cost of keeping one in object storage, at list price."""


@stored
class Prediction:
    """What the cost model says of a layout."""

    memory: tuple[StageMemory, ...]
    """One entry a pipeline stage."""
    host_ram_gib_per_node: float
    """Host memory that offload takes on each node."""
    nvme_gib_per_node: float = 0.0
    """Disk that offload takes on each node."""
    step_time_s: float
    """One optimizer step."""
    step_time_components_s: dict[Text, float]
    """By the names of ``kit.cost.time.step.StepTimeModel.components_s``; they add up to the step."""
    tokens_per_s: float
    """Tokens per second over all GPUs."""
    mfu: float
    """Causal model FLOPs over the dense peak of the precision."""
    bubble_fraction: float
    """(p−1)/(v·m+p−1): share of a step that a pipeline stage idles."""
    days: float | None
    """For the job's length, without checkpoints and failures; null where only the data can say how long it is."""
    cost_usd: float | None
    """For the same days; null without a price or days."""
    memory_band: float | None = None
    """Relative error of memory predictions of this kind against measurements; null = not yet measured."""
    step_time_band: float | None = None
    """Relative error of step-time predictions for this implementation; null = not yet measured."""
    step_time_evidence: Text = ""
    """The runs that the band was measured on, or the nearest ones that were measured."""
    operation: Operation
    """Checkpoints and failures."""

    @property
    def peak_gib(self) -> float:
        """Peak of the fullest stage."""
        return max(stage.peak_gib for stage in self.memory)

    @property
    def num_steps(self) -> float | None:
        """Optimizer steps in ``days``."""
        return None if self.days is None else self.days * SECONDS_PER_DAY / self.step_time_s

    @property
    def total_days(self) -> float | None:
        """``days`` including checkpoints and failures: infinite where these leave no time for training."""
        return None if self.days is None else self._including_stops(self.days)

    @property
    def total_cost_usd(self) -> float | None:
        """``cost_usd`` including checkpoints and failures; None without a price."""
        return None if self.cost_usd is None else self._including_stops(self.cost_usd)

    def _including_stops(self, quantity: float) -> float:
        return quantity / self.operation.goodput if self.operation.goodput else math.inf
