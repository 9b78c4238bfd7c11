"""The data of a run, opened and checked once, dealt out a step at a time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kit.engines.base import Engine, MicroBatch
from kit.errors import DataError
from kit.planner.plan import Plan
from kit.specs.run import RunSpec
from kit.training.data.batches import DataParallelShard, training_batches, validation_batches
from kit.training.data.fine_tuning_rows import Rows
from kit.training.data.indexed import IndexedTokens
from kit.training.data.samples import GptSamples, PackedSamples, RowSamples, Samples


@dataclass(frozen=True)
class DataLoader:
    """Micro batches of one data-parallel rank."""

    training: Samples
    validation: Samples | None
    shard: DataParallelShard
    seed: int
    validation_sequences: int
    bucketed: bool = False

    @classmethod
    def open(cls, plan: Plan, run: RunSpec, engine: Engine) -> DataLoader:
        """Raises DataError for files that are missing, damaged, too short or not of this model's vocabulary."""

        def samples(prefix: str) -> Samples:
            job, vocabulary = plan.job, plan.model.vocab_size
            if job.objective == "pretrain":
                return GptSamples(IndexedTokens(prefix), job.seq_length, vocabulary)
            rows = Rows(IndexedTokens(prefix), job.objective, job.seq_length, vocabulary)
            # Megatron's pipeline and its sequence and context parallelism divide a length that is known beforehand.
            kind = PackedSamples if run.data.packing else RowSamples
            return kind(rows, job.seq_length, fixed=plan.layout.engine == "megatron")

        if run.data.packing and plan.job.objective != "sft":
            raise DataError(
                f"run.data.packing with objective={plan.job.objective}: rows of sft are packed, text fills its "
                "sequences anyway and pairs have two lengths; leave it out"
            )

        return cls(
            training=samples(run.data.train),
            validation=None if run.data.validation is None else samples(run.data.validation),
            shard=DataParallelShard(
                micro_batch_size=plan.layout.micro_batch_size,
                gradient_accumulation_steps=plan.layout.gradient_accumulation_steps,
                dp_rank=engine.dp_rank,
                dp_size=engine.dp_size,
            ),
            seed=run.data.seed,
            validation_sequences=run.validation_sequences,
            bucketed=plan.job.objective != "pretrain",
        )

    def step(self, position: int, batch_size: int | None = None) -> list[MicroBatch]:
        """The step that begins at a position in the order; ``batch_size``: its samples over all ranks, in a ramp."""
        shard = self.shard
        if batch_size is not None and batch_size != shard.global_batch_size:
            per_round = shard.micro_batch_size * shard.dp_size
            shard = dataclasses.replace(shard, gradient_accumulation_steps=batch_size // per_round)
        return training_batches(self.training, self.seed, position, shard, self.bucketed)

    def validation_batches(self) -> list[MicroBatch] | None:
        """One evaluation; None where the run has no held-out data."""
        if self.validation is None:
            return None
        return validation_batches(self.validation, self.validation_sequences, self.shard)
