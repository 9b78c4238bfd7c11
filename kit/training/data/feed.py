"""The data of a run, opened and checked once, dealt out a step at a time."""

from __future__ import annotations

from dataclasses import dataclass

from kit.engines.base import Engine, MicroBatch
from kit.planner.plan import Plan
from kit.specs.run import RunSpec
from kit.training.data.batches import Share, training_batches, validation_batches
from kit.training.data.indexed import IndexedTokens
from kit.training.data.samples import GptSamples


@dataclass(frozen=True)
class Feed:
    """Micro batches of one data-parallel rank."""

    training: GptSamples
    validation: GptSamples | None
    share: Share
    seed: int
    validation_sequences: int

    @classmethod
    def open(cls, plan: Plan, run: RunSpec, engine: Engine) -> Feed:
        """Raises DataError for files that are missing, damaged, too short or not of this model's vocabulary."""

        def samples(prefix: str) -> GptSamples:
            return GptSamples(IndexedTokens(prefix), plan.job.seq_length, plan.model.vocab_size)

        return cls(
            training=samples(run.data.train),
            validation=None if run.data.validation is None else samples(run.data.validation),
            share=Share(
                micro_batch_size=plan.layout.micro_batch_size,
                gradient_accumulation_steps=plan.layout.gradient_accumulation_steps,
                dp_rank=engine.dp_rank,
                dp_size=engine.dp_size,
            ),
            seed=run.data.seed,
            validation_sequences=run.validation_sequences,
        )

    def step(self, samples_seen: int) -> list[MicroBatch]:
        """The step after ``samples_seen`` samples."""
        return training_batches(self.training, self.seed, samples_seen, self.share)

    def held_out(self) -> list[MicroBatch] | None:
        """One evaluation; None where the run has no held-out data."""
        if self.validation is None:
            return None
        return validation_batches(self.validation, self.validation_sequences, self.share)
