"""The exchange format on disk: safetensors under Hugging Face names, and a JSON file that describes them.

exchange.json               format, version, counters, model, and size + hash of every other file
master-00001.safetensors    fp32 weights, in shards
exp_avg-00001.safetensors   first moment, or momentum
exp_avg_sq-00001.safetensors   second moment

The optimizer decides which moments there are (kit/specs/optimizers.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.engines.collective import split_over_ranks
from kit.engines.io.sharded_safetensors import SafetensorsSource
from kit.engines.protocol import StateKind
from kit.errors import CheckpointError
from kit.specs.job import LoraSpec, OptimizerName
from kit.specs.model import ModelSpec
from kit.specs.optimizers import OPTIMIZERS
from kit.specs.strict_yaml import to_plain
from kit.specs.validation import SPEC
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.files import FileRecord, Files, OtherVersionError, read_sealed, sealed, verify

EXCHANGE_JSON = "exchange.json"
_FORMAT = "kit-exchange"
_VERSION = 3
_STEP = re.compile(r"exchange-step-(\d{8})")
KINDS = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
"""All kinds of state that an exchange checkpoint can have."""


@dataclass(frozen=True)
class _Contents:
    """Content of ``exchange.json``."""

    __pydantic_config__ = SPEC
    counters: Counters
    model: ModelSpec
    files: Files
    weight_map: dict[StateKind, dict[str, str]]
    """Kind → name of a tensor → file."""
    lora: LoraSpec | None = None
    """Set if the tensors are adapters, not the whole model."""
    optimizer: OptimizerName = "adamw"
    """What stepped the weights, which decides the kinds of state."""
    chat_template: str | None = None
    """Jinja text by which the chats of the run became tokens."""


class ExchangeCheckpoint:
    """An exchange checkpoint on disk. The constructor reads its JSON file only.

    Raises CheckpointError if that file is missing, damaged or of another format, or if a listed file is missing.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        index = self.path / EXCHANGE_JSON
        contents = _read(index)
        self.counters, self.model, self.lora = contents.counters, contents.model, contents.lora
        self.optimizer, self.chat_template = contents.optimizer, contents.chat_template
        self._records, self._weight_map = contents.files, contents.weight_map
        if unrecorded := {f for files in self._weight_map.values() for f in files.values()} - self._records.keys():
            raise CheckpointError(f"{index} has no hash of {min(unrecorded)}; copy the checkpoint again")

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """The kinds of state in this checkpoint: ``kinds_of`` its optimizer, or MASTER only."""
        return tuple(kind for kind in KINDS if kind in self._weight_map)

    def verify(self, share: bool = False) -> None:
        """Raises CheckpointError, which names the first missing, truncated or corrupted file. ``share``: this rank
        checks its share of the files only, so that the ranks together check all."""
        names = sorted(self._records)
        verify(self.path, {name: self._records[name] for name in (split_over_ranks(names) if share else names)})

    def source(self, kind: StateKind) -> SafetensorsSource:
        """The tensors of one kind of state. Raises CheckpointError if the checkpoint lacks this kind."""
        if kind not in self._weight_map:
            raise CheckpointError(f"{self.path} has no {kind.value}; export the run again with its optimizer state")
        return SafetensorsSource({name: self.path / file for name, file in self._weight_map[kind].items()})


def exchange_json(
    counters: Counters,
    model: ModelSpec,
    weight_map: Mapping[StateKind, Mapping[str, str]],
    records: Mapping[str, FileRecord],
    lora: LoraSpec | None = None,
    optimizer: OptimizerName = "adamw",
    chat_template: str | None = None,
) -> dict[str, Any]:
    """Content of ``exchange.json``, with its own hash."""
    files = {kind: dict(files) for kind, files in weight_map.items()}
    contents = _Contents(counters, model, dict(records), files, lora, optimizer, chat_template)
    return sealed({"format": _FORMAT, "version": _VERSION, **to_plain(contents)})


def kinds_of(optimizer: OptimizerName) -> tuple[StateKind, ...]:
    """The kinds of state in an exchange checkpoint of a run with this optimizer."""
    return (StateKind.MASTER, *map(StateKind, OPTIMIZERS[optimizer].state))


def is_exchange(directory: Path) -> bool:
    """Whether a directory contains an exchange checkpoint."""
    return (directory / EXCHANGE_JSON).is_file()


def newest_exchange(root: Path) -> Path | None:
    """The exchange checkpoint of the highest step in ``root``; None if there is none. Raises OSError if ``root`` cannot
    be listed."""
    found = exchanges(root)
    return found[max(found)] if found else None


def exchanges(root: Path) -> dict[int, Path]:
    """Step → exchange checkpoint in ``root``. Raises OSError if ``root`` cannot be listed."""
    listed = root.iterdir() if root.is_dir() else ()
    named = ((_STEP.fullmatch(path.name), path) for path in listed)
    return {int(match[1]): path for match, path in named if match and is_exchange(path)}


def _read(path: Path) -> _Contents:
    try:
        return read_sealed(path, _Contents, _FORMAT, _VERSION)
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} is not an exchange checkpoint (no readable {EXCHANGE_JSON}: {error.strerror}); give a "
            f"directory such as RUN/checkpoints/exchange-step-00000060"
        ) from error
    except OtherVersionError as error:
        raise CheckpointError(f"{error}; export it again with the kit that wrote it") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy the checkpoint again") from error
