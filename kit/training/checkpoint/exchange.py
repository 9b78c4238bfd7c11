"""The exchange format on disk: safetensors under Hugging Face names, and a JSON that says what they are.

hub.json                    format, version, counters, model, and size + hash of every other file
master-00001.safetensors    fp32 weights, in shards
exp_avg-00001.safetensors   Adam's first moment
exp_avg_sq-00001.safetensors   Adam's second moment
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kit.engines.base import StateKind
from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.errors import CheckpointError, KitError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.training.checkpoint.collective import share
from kit.training.checkpoint.files import FileRecord, records_from_json, verify

HUB_JSON = "hub.json"
FORMAT = "kit-hub"
VERSION = 2
KINDS = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
"""What a hub checkpoint holds of every parameter; one made of a model alone has no moments."""


@dataclass(frozen=True)
class Counters:
    """How far a run is; the learning rate and the data order follow from these alone."""

    step: int
    """Steps of the loop done."""
    samples_seen: int
    """Sequences in them, over all ranks."""
    tokens_seen: int
    """Tokens in those sequences."""
    optimizer_steps: int
    """Adam's step count (bias correction)."""
    samples_skipped: int = 0
    """Sequences that rewinds left out: the next sample is number ``samples_seen + samples_skipped``."""

    @property
    def position(self) -> int:
        """Number of the next sample in the order of the data."""
        return self.samples_seen + self.samples_skipped


class HubCheckpoint:
    """A hub checkpoint on disk. Opening reads ``hub.json`` only.

    Raises CheckpointError where that is missing, damaged, of another format, or names files that are not there.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        data = _read(self.path)
        try:
            self.counters = Counters(**data["counters"])
            self.model = TypeAdapter(ModelSpec).validate_json(json.dumps(data["model"]))
            self.lora = TypeAdapter(LoraSpec | None).validate_json(json.dumps(data.get("lora")))
            self._records = records_from_json(data["files"])
            self._weight_map = {StateKind(kind): dict(files) for kind, files in data["weight_map"].items()}
        except (KeyError, TypeError, ValueError, ValidationError, KitError) as error:
            raise CheckpointError(
                f"{self.path / HUB_JSON} is damaged ({' '.join(str(error).split())}); copy the checkpoint again"
            ) from error
        if unrecorded := {f for files in self._weight_map.values() for f in files.values()} - self._records.keys():
            raise CheckpointError(f"{self.path / HUB_JSON} has no hash of {min(unrecorded)}; copy the checkpoint again")

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """What it holds: all of ``KINDS``, or weights alone."""
        return tuple(kind for kind in KINDS if kind in self._weight_map)

    def verify(self, hashes: bool = True) -> None:
        """Raises CheckpointError that names the first missing, truncated or corrupted file."""
        verify(self.path, self._records, hashes)

    def verify_share(self) -> None:
        """As ``verify``, but this rank's share of the files only: together the ranks check them all."""
        verify(self.path, dict(share(sorted(self._records.items()))))

    def source(self, kind: StateKind) -> SafetensorsSource:
        """The tensors of one kind."""
        if kind not in self._weight_map:
            raise CheckpointError(f"{self.path} has no {kind.value}; export the run again with its optimizer state")
        return SafetensorsSource({name: self.path / file for name, file in self._weight_map[kind].items()})


def hub_json(
    counters: Counters,
    model: ModelSpec,
    weight_map: Mapping[StateKind, Mapping[str, str]],
    records: Mapping[str, FileRecord],
    lora: LoraSpec | None = None,
) -> dict[str, Any]:
    """The contents of ``hub.json``."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "counters": dataclasses.asdict(counters),
        "model": TypeAdapter(ModelSpec).dump_python(model, mode="json"),
        # What is held are adapters then, not the model.
        **({"lora": dataclasses.asdict(lora)} if lora is not None else {}),
        "files": {name: dataclasses.asdict(record) for name, record in records.items()},
        "weight_map": {kind.value: dict(files) for kind, files in weight_map.items()},
    }


def _read(directory: Path) -> dict[str, Any]:
    path = directory / HUB_JSON
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a hub checkpoint (no readable {HUB_JSON}: {error.strerror}); give a directory such as "
            f"RUN/checkpoints/hub-step-00000060"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy the checkpoint again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a hub checkpoint's (format is not {FORMAT!r}); give one that kit wrote")
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {data.get('version')!r}, this kit reads {VERSION}; "
            f"export it again with the kit that wrote it"
        )
    return data
