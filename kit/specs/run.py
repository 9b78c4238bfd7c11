"""How a run behaves: data, schedule, checkpoints, logging. Nothing here changes the plan or its hash."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from kit.errors import SpecError
from kit.object_storage import check_address, is_address
from kit.specs.hub import is_elsewhere
from kit.specs.job import MOST_SEQUENCES
from kit.specs.text import check_line, refuse, shown
from kit.specs.validation import Checked, Count, FrozenMap, Text, Within, spec

_MOST_STEPS = 10**11
"""So many steps of the largest batch are fewer than 2**63 sequences, and one a millisecond takes three years."""
_MOST_MINUTES = 60 * 24 * 3650
"""Ten years; waiting for longer than a century is an OverflowError of Python's threads."""
_Steps = Annotated[int, Count(gt=0, le=_MOST_STEPS)]
Seed = Annotated[int, Count(ge=0, lt=2**32)]
"""NumPy and Megatron take 32 bits."""


_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Tags of TensorBoard and labels of Prometheus take these, and an override such as ``run.data.blend.web.weight=2``."""


@spec
class BlendedSetSpec:
    """One training set of a blend."""

    path: Text
    """Prefix of its pair (without ``.bin``)."""
    weight: Annotated[float, Within(gt=0, le=1e12)]
    """Its share of the samples, over the sum of all weights."""


_FILE_READERS = ("json", "parquet", "text")
"""Values of ``stream.path`` that read ``data_files``; other values name a data set of the hub."""


@spec
class StreamSpec:
    """Text that the run reads and tokenises as it trains, without a copy on disk, by
    ``datasets.load_dataset(..., streaming=True)``. No code of a data set is run."""

    path: Text
    """``json`` (JSON Lines too), ``parquet``, ``text``, or a data set of the hub, such as ``HuggingFaceFW/fineweb``."""
    name: Text | None = None
    """Configuration of a set of the hub."""
    revision: Text | None = None
    """Commit of a set of the hub. Without it a run cannot be resumed after the set has changed."""
    split: Text = "train"
    data_files: tuple[Text, ...] = ()
    """Files, patterns of them, and addresses such as ``s3://bucket/part-*.jsonl``; of a set of the hub, files in it."""
    text_key: Text = "text"
    """Column of the text."""
    tokenizer: Text
    """Directory of a Hugging Face tokenizer."""
    shuffle_block: Annotated[int, Count(ge=0, le=10**6)] = 1000
    """Documents that are shuffled together; files are shuffled too. 0 or 1: the order of the files."""
    streams: Annotated[int, Count(gt=0, le=2**16)] | None = None
    """Number of virtual streams, on every layout; null: the largest power of two up to 64 that the files are enough
    for."""

    def __post_init__(self) -> None:
        files = self.path.startswith(("/", ".", "~")) or is_address(self.path)
        reasons = {
            f"path={self.path} without data_files; list the files, patterns or addresses to read": (
                self.path in _FILE_READERS and not self.data_files
            ),
            f"path={self.path} is a file or directory; use path={' or '.join(_FILE_READERS)} and list files in "
            "data_files": files,
            f"split={self.split} is not one whole split; name one, and list its files in data_files": (
                "[" in self.split or "+" in self.split
            ),
        }
        refuse(reasons)
        for file in self.data_files:
            if is_address(file):
                check_address("data_files", file)


@spec
class DataSpec:
    """Tokenised data: prefixes of Megatron ``.bin``/``.idx`` pairs, as ``kit convert data`` writes them: paths, or
    addresses such as s3://bucket/sets/a, from which each rank reads what it needs. Or text (``stream``). ``train`` and
    ``validation`` may also be raw rows (.jsonl, .parquet, text, a saved data set): they are tokenised once, when the
    run directory is written, by the tokenizer of run.model_path."""

    train: Text | None = None
    """Prefix of the training pair (without ``.bin``); null with ``blend`` or ``stream``, and for a script of your own,
    which reads its own data."""
    stream: StreamSpec | None = None
    """Text to tokenise while training, instead of ``train``."""
    blend: Annotated[dict[Text, BlendedSetSpec], Checked(FrozenMap)] = FrozenMap({})
    """Name → training set, instead of ``train``: samples come from several sets by weight, in the order of Megatron's
    ``--data-path WEIGHT PREFIX …``. A set that is used up starts its next epoch."""
    validation: Text | None = None
    """Prefix of the held-out pair."""
    chat_template: Text | None = None
    """Template of raw chats: a Jinja file, or plain, which comes with kit; null: the tokenizer's own."""
    validation_sets: Annotated[dict[Text, Text], Checked(FrozenMap)] = FrozenMap({})
    """Name → prefix of a further held-out pair, whose loss is logged under its name."""
    seed: Seed = 1234
    """Seed of the sample order."""
    wrap: bool = True
    """Whether a run that needs more samples than ``train`` has begins its next epoch, in another order. false refuses
    such a run before its first step; with ``stream``, whose length nobody knows, it ends the run at that step."""
    packing: bool = False
    """sft: put as many rows into a sequence as fit, each with its own positions and attention. A sample is then one
    such sequence, and a step has job.global_batch_size of them."""
    allow_many_epochs: bool = False
    """Says that a run of more than 20 epochs is meant."""

    def __post_init__(self) -> None:
        other = "blend" if self.train is None else f"train={self.train}"
        reasons = {
            "train is required and missing; give the prefix of one set, or several as blend": (
                not self.named and (self.validation is not None or self.validation_sets or self.packing)
            ),
            f"{other} and stream are both there, and a run trains on one of them; leave out one": (
                self.stream is not None and (self.train is not None or self.blend)
            ),
            "packing with stream, whose text fills every sequence; leave out packing": self.stream and self.packing,
            f"train={self.train} and blend are both there; leave out train, or list it in blend": (
                self.train is not None and self.blend
            ),
            "wrap=false with blend, whose sets end at different times; leave out wrap, or use train": (
                self.blend and not self.wrap
            ),
        }
        refuse(reasons)
        for name in (*self.blend, *self.validation_sets):
            if not _SET_NAME.fullmatch(name):
                raise SpecError(f"the data set {shown(name)} has a name for metrics: use letters, digits, _ and -")
        for key, path in data_paths(self).items():
            if is_address(path):
                check_address(key.removeprefix("data."), path)

    @property
    def named(self) -> bool:
        """Whether there is training data: kit's own loop needs it, a user's own script does not."""
        return self.train is not None or bool(self.blend) or self.stream is not None

    @property
    def training_paths(self) -> tuple[str, ...]:
        """Prefix of every training pair; files of a stream, or its name on the hub."""
        if self.stream is not None:
            return self.stream.data_files or (self.stream.path,)
        return tuple(part.path for part in self.blend.values()) or (str(self.train),)


def data_paths(data: DataSpec) -> dict[str, str]:
    """Key → prefix, of every pair that the data name."""
    paths = {
        "train": data.train,
        **{f"blend.{name}.path": part.path for name, part in data.blend.items()},
        "validation": data.validation,
        **{f"validation_sets.{name}": path for name, path in data.validation_sets.items()},
    }
    return {f"data.{key}": path for key, path in paths.items() if path}


@spec
class BatchRampSpec:
    """A batch that grows in equal steps from ``start`` to job.global_batch_size (Megatron-LM's rampup_batch_size)."""

    start: Annotated[int, Count(gt=0, le=MOST_SEQUENCES)]
    """Sequences of the first step; a multiple of micro_batch_size · dp."""
    increment: Annotated[int, Count(gt=0, le=MOST_SEQUENCES)]
    """Sequences that each growth adds; divides job.global_batch_size less ``start``."""
    samples: Annotated[int, Count(gt=0, le=_MOST_STEPS * MOST_SEQUENCES)]
    """Sequences seen until the batch reaches job.global_batch_size; each size lasts for an equal part of them."""


_KIND_OF_KEY = {
    "decay_steps": "warmup_stable_decay",
    "decay_style": "warmup_stable_decay",
    "num_cycles": "cosine_with_restarts",
}


@spec
class ScheduleSpec:
    """Learning rate as a function of the samples seen: linear warm-up, then one of transformers' schedules."""

    kind: Literal["cosine", "constant", "linear", "inverse_sqrt", "warmup_stable_decay", "cosine_with_restarts"] = (
        "cosine"
    )
    """As transformers' ``lr_scheduler_type``. Each has the floor of ``min_ratio``."""
    warmup_steps: Annotated[float, Within(ge=0, le=_MOST_STEPS)] | None = None
    """Optimizer steps of linear warm-up, at most a tenth of the run; below 1, a share of the run, as in transformers.
    null: what is usual for the objective, 2,000 in pretraining and 0.03 for SFT."""
    min_ratio: Annotated[float, Within(ge=0, le=1)] = 0.1
    """Final over peak learning rate."""
    decay_steps: _Steps | None = None
    """warmup_stable_decay: optimizer steps of the decay at the end; null: a tenth of the run (Hu et al. 2024,
    MiniCPM, section 4.3)."""
    decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """warmup_stable_decay: form of the decay; Megatron-LM's ``--lr-wsd-decay-style``, with its default."""
    num_cycles: Annotated[int, Count(gt=0, le=1000)] = 1
    """cosine_with_restarts: cosines after the warm-up, each from the peak."""
    batch_ramp: BatchRampSpec | None = None
    """null: every step has job.global_batch_size."""

    def __post_init__(self) -> None:
        for key, kind in _KIND_OF_KEY.items():
            value = getattr(self, key)
            if value != type(self).__dataclass_fields__[key].default and self.kind != kind:
                raise SpecError(f"{key}={value} is a key of kind={kind}, and kind is {self.kind}; remove the key")
        if self.kind == "inverse_sqrt" and self.warmup_steps == 0:
            raise SpecError("kind=inverse_sqrt falls from the end of the warm-up; use warmup_steps of 1 or more")


@spec
class CheckpointSpec:
    """Checkpoints on the way and at the end."""

    every_steps: _Steps = 1000
    keep_last: _Steps = 5
    """Older checkpoints of this run are removed."""
    keep_every_steps: _Steps | None = None
    """Checkpoints of multiples of this are kept for good, however old."""
    asynchronous: bool = False
    """Training stops only while the state is copied to host memory; a thread writes it. Needs host memory for one
    checkpoint, and state that is not offloaded to NVMe."""
    remote: Text | None = None
    """Address to which a process beside the run copies every finished checkpoint (s3://bucket/prefix), one prefix for
    each run; null: none. ``--resume auto`` takes the newest good checkpoint of both places. Credentials come from the
    environment."""

    def __post_init__(self) -> None:
        if self.remote is not None:
            check_address("remote", self.remote)


@spec
class LimitsSpec:
    """When a run ends by itself before its last step."""

    max_minutes: Annotated[float, Within(gt=0, le=_MOST_MINUTES)] | None = None
    """Minutes since the run's processes started. Then the run writes a checkpoint and exits with code 75; start it
    again to continue."""
    hang_seconds: Annotated[float, Within(gt=0, le=60 * _MOST_MINUTES)] | None = 1800.0
    """Longest time of a step. If a step takes longer, every rank writes its stacks to ``stacks/`` and exits with code
    70. null: no limit."""


SpikeAction = Literal["off", "warn", "discard", "rewind"]
NotFiniteAction = Literal["stop", "discard", "rewind"]


@spec
class StabilitySpec:
    """What the loop does about an unusual step. ``discard``: skip the optimizer step; the batch is lost. ``rewind``: go
    back to the last checkpoint and continue with the batches after the bad step."""

    loss_spike: SpikeAction = "warn"
    gradient_spike: SpikeAction = "warn"
    """What to do about a spike of the gradient norm before clipping, which every engine knows before its optimizer
    step."""
    not_finite: NotFiniteAction = "stop"
    """What to do about a loss or gradient norm that is NaN or infinite. Steps that fp16's loss scaling skips do not
    count."""
    sigmas: Annotated[float, Within(gt=0, le=1e6)] = 6.0
    """A spike is more than this many standard deviations above the median of the window. The deviation is estimated
    from the median distance to the median, which an earlier spike does not widen."""
    window_steps: Annotated[int, Count(ge=8, le=10**6)] = 128
    """Number of earlier steps that a step is compared with. No spike is reported before a quarter of them have run."""
    max_rewinds: Annotated[int, Count(ge=0, le=_MOST_STEPS)] = 3
    """Most rewinds to one checkpoint; after them the run ends with an error."""


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@spec
class LoggingSpec:
    """What the run logs, and where."""

    every_steps: _Steps = 10
    """Steps between two lines on the terminal; metrics.jsonl has every step."""
    gradients_at_steps: tuple[_Steps, ...] = ()
    """Steps (from 1) at which full gradients go to ``gradients/step-NNNNNN.safetensors``, for comparisons."""
    gradient_norms_every_steps: _Steps | None = None
    """Steps between two that log the gradient norm of each group of parameters, which reads every gradient; null:
    never."""
    trackers: tuple[Tracker, ...] = ()
    """Trackers that also get the values of metrics.jsonl, through accelerate. Each needs its package."""
    prometheus_port: Annotated[int, Count(gt=0, lt=65536)] | None = None
    """Port on which the main rank serves metrics to Prometheus; null: none."""
    prometheus_address: Text = "127.0.0.1"
    """Address of that port. With 0.0.0.0 it is open on all addresses of the node: whoever reaches the port can read the
    run's metrics."""


@spec
class RunSpec:
    """Everything an engine needs at run time that planning does not."""

    model_path: Text | None = None
    """Hugging Face directory to start from (weights, config, tokenizer), or a hub id such as ``Qwen/Qwen3-8B``; a path
    wins. null: random weights from ``seed``."""
    nvme_path: Text | None = None
    """Directory on every node's own disk, for what the layout offloads to nvme. A run makes one folder there for its
    swap files, and removes it when it ends."""
    data: DataSpec = DataSpec()
    steps: _Steps | None = None
    """Optimizer steps; null: as many as ``job.epochs`` or ``job.total_tokens`` make."""
    seed: Seed = 1234
    """Seed of initialisation and dropout."""
    deterministic: bool = False
    """Only kernels that give the same bits each time, as far as torch has them; an operation without one is an error.
    Slower on GPUs."""
    schedule: ScheduleSpec = ScheduleSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    limits: LimitsSpec = LimitsSpec()
    stability: StabilitySpec = StabilitySpec()
    logging: LoggingSpec = LoggingSpec()
    validation_every_steps: _Steps | None = None
    """Steps between evaluations on the held-out data; null: only at the end."""
    validation_sequences: Annotated[int, Count(gt=0, le=10**12)] = 64
    """Sequences of one evaluation, the first of the held-out set in file order."""


def run_paths(run: RunSpec, base: Path = Path()) -> dict[str, str]:
    """Key → path, of every path on a disk that the run names: not of hub ids. ``base``: where relative paths begin."""
    own = {"model_path": run.model_path, "nvme_path": run.nvme_path}
    if (template := run.data.chat_template) is not None and Path(template).suffix:
        own["data.chat_template"] = template  # otherwise it is the name of one that comes with kit
    data = {key: path for key, path in data_paths(run.data).items() if not is_address(path)}
    if (stream := run.data.stream) is not None:
        own["data.stream.tokenizer"] = stream.tokenizer
        if stream.path in _FILE_READERS:
            local = ((n, file) for n, file in enumerate(stream.data_files) if not is_address(file))
            own |= {f"data.stream.data_files.{n}": file for n, file in local}
    ids = [key for key in ("model_path", "data.stream.tokenizer") if is_elsewhere(own.get(key) or "", base)]
    return data | {key: path for key, path in own.items() if path and key not in ids}


def with_paths(run: RunSpec, paths: Mapping[str, str]) -> RunSpec:
    """Replaces paths of a run, by the keys of ``run_paths``. Raises SpecError where a directory on the way has a
    control character in its name."""
    for key, path in paths.items():
        check_line(f"run.{key}", path)

    data = run.data
    blend = {
        name: dataclasses.replace(part, path=paths.get(f"data.blend.{name}.path", part.path))
        for name, part in data.blend.items()
    }
    sets = {name: paths.get(f"data.validation_sets.{name}", path) for name, path in data.validation_sets.items()}
    stream = data.stream
    if stream is not None:
        files = tuple(paths.get(f"data.stream.data_files.{n}", file) for n, file in enumerate(stream.data_files))
        tokenizer = paths.get("data.stream.tokenizer", stream.tokenizer)
        stream = dataclasses.replace(stream, tokenizer=tokenizer, data_files=files)
    return dataclasses.replace(
        run,
        model_path=paths.get("model_path", run.model_path),
        nvme_path=paths.get("nvme_path", run.nvme_path),
        data=dataclasses.replace(
            data,
            train=paths.get("data.train", data.train),
            stream=stream,
            blend=blend,
            validation=paths.get("data.validation", data.validation),
            chat_template=paths.get("data.chat_template", data.chat_template),
            validation_sets=sets,
        ),
    )


def absolute_paths(run: RunSpec, base: Path) -> RunSpec:
    """Paths relative to ``base`` → absolute ones; ``~`` and ``~name`` mean what they mean to a shell.

    Raises SpecError where this machine knows no home of that user."""
    absolute: dict[str, str] = {}
    for key, path in run_paths(run, base).items():
        try:
            absolute[key] = str((base / Path(path).expanduser()).resolve())
        except RuntimeError:
            raise SpecError(
                f"run.{key}={path}: this machine knows no home directory of {Path(path).parts[0]}; write the whole "
                f"path, or ./{path} for a directory of that name"
            ) from None
    return with_paths(run, absolute)
