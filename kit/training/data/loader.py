"""Opens and checks the data of a run, and returns each data-parallel rank's micro batches step by step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from kit.engines.protocol import Engine, MicroBatch
from kit.errors import DataError
from kit.planner.length import check_epochs, length, needs_epoch
from kit.planner.plan import Plan
from kit.specs.epoch import Epoch
from kit.specs.run import RunSpec
from kit.training.counters import Counters
from kit.training.data.blend import BlendedSamples
from kit.training.data.fine_tuning_rows import Rows
from kit.training.data.indexed import IndexedTokens
from kit.training.data.samples import MULTIPLE, GptSamples, RowSamples, Samples, TrainingSamples
from kit.training.data.stream import StreamSamples

if TYPE_CHECKING:
    from kit.emit.run_directory import RunDirectory


@dataclass(frozen=True)
class DataParallelShard:
    """The part of every step that one data-parallel rank gets."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_rank: int
    dp_size: int

    @property
    def global_batch_size(self) -> int:
        """Number of samples per step, over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size

    def positions(self, micro_batch: int) -> list[int]:
        """Positions k of a micro batch's samples in the step: k = (a·dp + dp_rank)·mbs + b, for micro batch a and
        sample b."""
        first = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return list(range(first, first + self.micro_batch_size))


def training_batches(
    samples: TrainingSamples, seed: int, samples_seen: int, shard: DataParallelShard, bucketed: bool = False
) -> list[MicroBatch]:
    """This rank's micro batches of the step that follows ``samples_seen`` samples.

    The step has the samples at positions ``samples_seen`` to ``samples_seen + global batch`` of the order, on every
    layout. ``bucketed``: distribute the samples longest first, so that samples of one micro batch, and micro batches
    that ranks compute at the same time, are about equally long. The step's gradient does not change.
    """

    def drawn(k: int) -> int:
        return samples.drawn(seed, samples_seen + k)

    at: Callable[[int], int] = drawn
    if bucketed:
        whole = sorted(map(drawn, range(shard.global_batch_size)), key=lambda index: (-samples.length(index), index))
        at = whole.__getitem__
    return samples.micro_batches([[*map(at, shard.positions(a))] for a in range(shard.gradient_accumulation_steps)])


def validation_batches(samples: Samples, num_sequences: int, shard: DataParallelShard) -> list[MicroBatch]:
    """This rank's part of the first ``num_sequences`` samples, in file order.

    Every rank gets an equal number of micro batches, as engines require. The labels of rows beyond the end are masked.
    """
    total = min(num_sequences, len(samples))
    per_round = shard.micro_batch_size * shard.dp_size
    return samples.micro_batches(
        [[k if k < total else None for k in shard.positions(a)] for a in range(-(-total // per_round))]
    )


@dataclass(frozen=True)
class DataLoader:
    """Returns the micro batches of one data-parallel rank."""

    training: TrainingSamples
    validation: Mapping[str | None, Samples]
    """Name of a held-out set → its samples; None is the name of ``run.data.validation``."""
    shard: DataParallelShard
    seed: int
    validation_sequences: int
    bucketed: bool = False

    @classmethod
    def open(cls, plan: Plan, run: RunSpec, engine: Engine) -> DataLoader:
        """Open the data of a run. Raises DataError if a file is missing, damaged or too short, or if a token id is not
        in the model's vocabulary."""

        samples = partial(open_samples, plan, run)
        held_out: list[tuple[str | None, str | None]] = [(None, run.data.validation), *run.data.validation_sets.items()]
        training: TrainingSamples
        if run.data.stream is not None:
            training = StreamSamples(run.data, plan.job.seq_length, plan.model.vocab_size)
        else:
            training = one_epoch = training_samples(plan, run)
            if not run.data.wrap:
                _check_one_epoch(len(one_epoch), plan, run)
        return cls(
            training=training,
            validation={name: samples(path) for name, path in held_out if path is not None},
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
        """Micro batches of the step that begins at ``position`` in the order. ``batch_size``: samples over all ranks,
        during a batch size ramp."""
        shard = self.shard
        if batch_size is not None and batch_size != shard.global_batch_size:
            per_round = shard.micro_batch_size * shard.dp_size
            shard = dataclasses.replace(shard, gradient_accumulation_steps=batch_size // per_round)
        return training_batches(self.training, self.seed, position, shard, self.bucketed)

    def validation_batches(self) -> dict[str | None, list[MicroBatch]]:
        """Micro batches of one evaluation, by the name of the set."""
        return {
            name: validation_batches(samples, self.validation_sequences, self.shard)
            for name, samples in self.validation.items()
        }

    def place(self, counters: Counters) -> Counters:
        """Collective. The counters with the place in streamed data, for a checkpoint."""
        if not isinstance(self.training, StreamSamples):
            return counters
        return dataclasses.replace(counters, stream=self.training.place(counters.position))

    def resume(self, counters: Counters) -> None:
        """Begin at a checkpoint's place in streamed data. Raises CheckpointError if it is a place in other data."""
        if isinstance(self.training, StreamSamples) and counters.stream is not None:
            self.training.resume(counters.stream)


def open_samples(plan: Plan, run: RunSpec, prefix: str) -> Samples:
    """The samples of a pair, as the plan's objective reads it. Raises DataError."""
    job, vocabulary = plan.job, plan.model.vocab_size
    if run.data.packing and job.objective != "sft":
        raise DataError(
            f"run.data.packing with objective={job.objective}: rows of sft are packed, text fills its sequences anyway "
            "and pairs have two lengths; leave it out"
        )
    if job.objective == "pretrain":
        return GptSamples(IndexedTokens(prefix), job.seq_length, vocabulary)
    rows = Rows(IndexedTokens(prefix), job.objective, job.seq_length, vocabulary)
    # Megatron's pipeline, sequence and context parallelism need a sequence length that is known in advance; ranks that
    # split sequences need equal parts, the ring two each.
    multiple = job.seq_length if plan.layout.engine == "megatron" else math.lcm(MULTIPLE, 2 * plan.layout.cp)
    return RowSamples(rows, job.seq_length, multiple, run.data.packing)


def training_samples(plan: Plan, run: RunSpec) -> Samples:
    """The training samples of one pair or of a blend. Raises DataError."""
    if run.data.train is not None:
        return open_samples(plan, run, run.data.train)
    blend = run.data.blend.values()
    return BlendedSamples([open_samples(plan, run, part.path) for part in blend], [part.weight for part in blend])


def counted(rundir: RunDirectory) -> tuple[RunDirectory, str]:
    """(the run with its number of steps in ``run.steps``, a line that says how it follows from the data). The line is
    empty for a run whose steps do not follow from its data.

    Raises DataError, and SpecError for more epochs than are rarely meant (``check_epochs``)."""
    plan, run = rundir.plan, rundir.run
    if run.data.stream is not None:
        return rundir, ""
    samples = training_samples(plan, run)
    epoch = Epoch(samples=len(samples), tokens=samples.num_tokens)
    check_epochs(plan, run, epoch)
    steps, seen = length(plan, run, epoch)
    line = ""
    if needs_epoch(plan, run):
        kind = "packed sequences" if run.data.packing else "windows" if plan.job.objective == "pretrain" else "rows"
        line = f"{steps:,} steps: {seen / len(samples):.3g} epochs of {len(samples):,} {kind}"
    return dataclasses.replace(rundir, run=dataclasses.replace(run, steps=steps)), line


def _check_one_epoch(available: int, plan: Plan, run: RunSpec) -> None:
    """Raises DataError if the run needs more than ``available`` samples."""
    _, needed = length(plan, run)
    if needed > available:
        size = plan.layout.global_batch_size
        raise DataError(
            f"run.data.wrap=false: the run needs {needed:,} samples and {run.data.train} has {available:,}, "
            f"{available // size} whole steps of {size}; use run.steps={available // size}, or wrap=true"
        )


def should_prefetch(device: str) -> bool:
    """Whether to read ahead: only on GPUs. A CPU process needs its cores for the computation."""
    return device == "cuda"


class Prefetcher:
    """Reads a step of a DataLoader ahead of time, after ``expect`` has named it. Without ``wanted`` it reads in
    ``step``."""

    def __init__(self, loader: DataLoader, *, wanted: bool, pinned: bool = False) -> None:
        self.loader, self._pinned = loader, pinned
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kit-data") if wanted else None
        self._coming: dict[tuple[int, int], Future[list[MicroBatch]]] = {}
        """The step that is read ahead, by its position and batch size."""

    def step(self, position: int, batch_size: int) -> list[MicroBatch]:
        """Micro batches of a step, as ``DataLoader.step``. Raises DataError, also for an error that occurred while
        reading ahead."""
        coming = self._coming.pop((position, batch_size), None)
        for other in self._coming.values():
            other.cancel()
        self._coming.clear()
        return self._read(position, batch_size) if coming is None else coming.result()

    def expect(self, position: int, batch_size: int) -> None:
        """Start to read the step that the next call of ``step`` will probably ask for."""
        if self._reader is not None:
            self._coming[position, batch_size] = self._reader.submit(self._read, position, batch_size)

    def close(self) -> None:
        """Stop reading ahead. Waits for a read in progress."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _read(self, position: int, batch_size: int) -> list[MicroBatch]:
        batches = self.loader.step(position, batch_size)
        return [pin(batch) for batch in batches] if self._pinned else batches


def pin(batch: MicroBatch) -> MicroBatch:
    """Copy a batch into page-locked memory. torch keeps the memory until copies from it are done
    (CachingHostAllocator). Not ``sequence_ids``, which only the host reads."""
    fields = {
        field.name: getattr(batch, field.name).pin_memory()
        for field in dataclasses.fields(batch)
        if field.name != "sequence_ids" and isinstance(getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **fields)
