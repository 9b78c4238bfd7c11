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
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kit.engines.base import StateKind
from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.errors import CheckpointError, KitError
from kit.specs.job import LoraSpec
from kit.specs.model import ModelSpec
from kit.training.checkpoint.collective import share
from kit.training.checkpoint.counters import Counters, counters_from_json
from kit.training.checkpoint.files import FileRecord, records_from_json, verify
from kit.training.checkpoint.manifest import OtherVersionError, read_sealed, sealed

HUB_JSON = "hub.json"
FORMAT = "kit-hub"
VERSION = 3
_UNSEALED = 2
"""The version before had no hash of itself; all else is alike."""
KINDS = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
"""What a hub checkpoint holds of every parameter; one made of a model alone has no moments."""


class HubCheckpoint:
    """A hub checkpoint on disk. Opening reads ``hub.json`` only.

    Raises CheckpointError where that is missing, damaged, of another format, or names files that are not there.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        data = _read(self.path)
        self.note: str | None = None
        """What a person should know of how it was read."""
        if data["version"] == _UNSEALED:
            self.note = f"{self.path} is of version {_UNSEALED}, whose counters no hash protects: export it again"
        try:
            self.counters = counters_from_json(data["counters"])
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
    return sealed(
        {
            "format": FORMAT,
            "version": VERSION,
            "counters": dataclasses.asdict(counters),
            "model": TypeAdapter(ModelSpec).dump_python(model, mode="json"),
            # What is held are adapters then, not the model.
            **({"lora": dataclasses.asdict(lora)} if lora is not None else {}),
            "files": {name: dataclasses.asdict(record) for name, record in records.items()},
            "weight_map": {kind.value: dict(files) for kind, files in weight_map.items()},
        }
    )


def _read(directory: Path) -> dict[str, Any]:
    path = directory / HUB_JSON
    try:
        return read_sealed(path, FORMAT, VERSION, _UNSEALED)
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a hub checkpoint (no readable {HUB_JSON}: {error.strerror}); give a directory such as "
            f"RUN/checkpoints/hub-step-00000060"
        ) from error
    except OtherVersionError as error:
        raise CheckpointError(f"{error}; export it again with the kit that wrote it") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy the checkpoint again") from error
