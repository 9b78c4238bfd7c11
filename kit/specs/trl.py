"""Objectives that TRL's trainers run under kit's files: what they compute and hold beside a step of the model. One row
each, read in TRL 1.16 (trl/trainer/*_trainer.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kit.specs.job import GrpoSpec, JobSpec, Objective


class TrlObjective(NamedTuple):
    """One of TRL's trainers. Its batch counts rows."""

    trainer: str
    """TRL's class, and the script of examples/ that calls it: DPOTrainer, trl_dpo.py."""
    sequences: int = 1
    """Sequences of a row: a pair of answers has two."""
    policy_forwards: int = 0
    """Forwards of the trained model without gradient, for each sequence."""
    reference_forwards: int = 0
    """Forwards of the reference model, a frozen copy of the model; 0: there is none."""
    scores: bool = False
    """Whether the head is one score instead of the vocabulary."""
    generates: bool = False
    """Whether the step begins with generating the completions."""


TRL: Mapping[Objective, TrlObjective] = {
    "dpo": TrlObjective("DPOTrainer", sequences=2, reference_forwards=1),
    # Both models also score each prompt with the answer of another row, for the KL term (_compute_kl_logps).
    "kto": TrlObjective("KTOTrainer", policy_forwards=1, reference_forwards=2),
    "reward": TrlObjective("RewardTrainer", sequences=2, scores=True),
    "grpo": TrlObjective("GRPOTrainer", generates=True),
}


def trl_objective(job: JobSpec) -> TrlObjective | None:
    """The row of the job's objective; None where kit's own loop trains. GRPO has a reference model where beta > 0, and
    scores vLLM's completions once more, because vLLM's own probabilities differ (vllm_importance_sampling_correction).
    """
    row = TRL.get(job.objective)
    if row is None or not row.generates:
        return row
    grpo = job.grpo or GrpoSpec()
    return row._replace(
        reference_forwards=int(grpo.beta > 0), policy_forwards=int(grpo.vllm_gpu_memory_utilization is not None)
    )
