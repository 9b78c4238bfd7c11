"""A checkpoint on disk, whatever engine and layout wrote it: plain safetensors, and a manifest that describes them.

step-00000020/manifest.json         plan, world size, model, counters; the file of each tensor; size and hash of
                                    each file; a hash of itself. Written last.
step-00000020/model/model-00001-of-00002.safetensors
                                    fp32 master weights under Hugging Face names, with the files that transformers
                                    needs to load them
step-00000020/exp_avg/…, exp_avg_sq/…
                                    the moments that the optimizer has (kit/specs/optimizers.py), in the same files
step-00000020/private/rank-00000.safetensors
                                    what only the layout that wrote it can use, bit for bit (Adafactor's factors)
step-00000020/random/rank-00000.json
                                    each rank's random generators
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from kit.engines.collective import split_over_ranks
from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec, OptimizerName
from kit.specs.model import ModelSpec
from kit.specs.optimizers import OPTIMIZERS
from kit.specs.strict_yaml import to_plain
from kit.specs.text_files import parse_json, read_text
from kit.specs.validation import Within, stored
from kit.training.checkpoint.files import (
    MOST_BYTES,
    Files,
    OtherVersionError,
    read_checked,
    refuse_unlisted,
    verify,
    with_checksum,
)
from kit.training.checkpoint.storage import MANIFEST, step_of
from kit.training.counters import Counters

FOLDERS = {StateKind.MASTER: "model", StateKind.EXP_AVG: "exp_avg", StateKind.EXP_AVG_SQ: "exp_avg_sq"}
"""Kind of state → its folder, for all kinds that a checkpoint can have."""
PRIVATE, RANDOM = "private", "random"
_FORMAT = "kit-checkpoint"
_VERSION = 1
_LARGEST_WORLD = 1 << 24


@stored
class Manifest:
    """Content of ``manifest.json``. Raises ValueError if it contradicts itself."""

    counters: Counters
    model: ModelSpec
    files: Files
    weight_map: dict[str, str]
    """Hugging Face name of a tensor → its file, in the folder of each kind."""
    kinds: tuple[StateKind, ...]
    """Master weights, and the moments; a checkpoint before the first step may have weights alone."""
    optimizer: OptimizerName = "adamw"
    """What stepped the weights."""
    lora: LoraSpec | None = None
    """Set if the tensors are adapters, not the whole model."""
    chat_template: str | None = None
    """Jinja text by which the chats of the run became tokens."""
    plan_hash: str = ""
    """Digest of the plan of the run that wrote it; empty if no run did."""
    world_size: Annotated[int, Within(ge=1, le=_LARGEST_WORLD)] = 1
    scalars: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    """``Engine.scalars``."""

    def __post_init__(self) -> None:
        if self.kinds not in (kinds_of(self.optimizer), (StateKind.MASTER,)):
            raise ValueError(f"kinds are {', '.join(self.kinds)}, which is not the state of {self.optimizer}")
        needed = {f"{FOLDERS[kind]}/{file}" for kind in self.kinds for file in self.weight_map.values()}
        if unrecorded := needed - self.files.keys():
            raise ValueError(f"it has no hash of {min(unrecorded)}")
        for folder, ending in ((PRIVATE, "safetensors"), (RANDOM, "json")):
            found = {name for name in self.files if name.startswith(f"{folder}/")}
            if found not in (set(), {f"{folder}/rank-{rank:05d}.{ending}" for rank in range(self.world_size)}):
                raise ValueError(f"{folder}/ must have one file for each of {self.world_size} ranks")


class Checkpoint:
    """A checkpoint on disk. The constructor reads its manifest only.

    Raises CheckpointError if the manifest is missing, damaged or of another format; ForeignError if another version of
    kit wrote it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = _read(self.path)

    def verify(self, share: bool = False) -> None:
        """Raises CheckpointError, which names the first file that is missing, truncated or corrupted; also for a
        directory with the name of another step. ``share``: this rank hashes its share of the files only, so that the
        ranks together hash all."""
        if step_of(self.path.name) not in (None, step := self.manifest.counters.step):
            raise CheckpointError(f"{self.path} is of step {step} by its manifest; if all of it is, rename it")
        records = sorted(self.manifest.files.items())
        verify(self.path, dict(split_over_ranks(records) if share else records))

    def refuse_unlisted(self) -> None:
        """Raises CheckpointError, which names the first file that the manifest does not list."""
        refuse_unlisted(self.path, {*self.manifest.files, MANIFEST})

    def source(self, kind: StateKind) -> SafetensorsSource:
        """The tensors of one kind of state. Raises CheckpointError if the checkpoint lacks this kind."""
        if kind not in self.manifest.kinds:
            raise CheckpointError(f"{self.path} has no {kind.value}: it was written without the optimizer's state")
        folder = self.path / FOLDERS[kind]
        return SafetensorsSource({name: folder / file for name, file in self.manifest.weight_map.items()})

    def has(self, folder: str) -> bool:
        """Whether it has files in a folder: PRIVATE or RANDOM."""
        return any(name.startswith(f"{folder}/") for name in self.manifest.files)


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """Content of ``manifest.json``, with its own hash."""
    return with_checksum({"format": _FORMAT, "version": _VERSION, **to_plain(manifest)})


def kinds_of(optimizer: OptimizerName) -> tuple[StateKind, ...]:
    """The kinds of state in a checkpoint of a run with this optimizer."""
    return (StateKind.MASTER, *map(StateKind, OPTIMIZERS[optimizer].state))


def written_by_kit(directory: Path) -> bool:
    """Whether a directory has a manifest that is not of an earlier format of kit. A damaged manifest has it."""
    path = directory / MANIFEST
    try:
        return path.is_file() and parse_json(read_text(path, MOST_BYTES)).get("format") != "kit-native"
    except (OSError, ValueError, AttributeError):
        return path.is_file()


class ForeignError(CheckpointError):
    """A checkpoint is not damaged, but another version of kit wrote it."""


def _read(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        return read_checked(path, Manifest, _FORMAT, _VERSION)
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a checkpoint (no readable {MANIFEST}: {error.strerror}); give a directory such as "
            f"RUN/checkpoints/step-00000060"
        ) from error
    except OtherVersionError as error:
        raise ForeignError(
            f"{error}; write it anew for this kit: kit convert model {directory} --to step --out NEW"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy the checkpoint again") from error
