"""Native checkpoints, in an engine's own format. A directory is complete or absent.

    checkpoints/step-00000020/manifest.json    plan hash, world size, counters, size + hash of every file
    checkpoints/step-00000020/state/           what ``Engine.save`` wrote
    checkpoints/step-00000020/random/          every rank's random generators (``random_state``)
    checkpoints/latest                         name of the newest, for people and scripts; loading ignores it

All files must be in the manifest, with their sizes and hashes. ``kit.engines.closed_list`` still restricts the classes
that a pickle may load, because an attacker who can write a pickle can also write a manifest.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
from pydantic import Field

from kit.engines.collective import rank, run_collectively, split_over_ranks
from kit.engines.protocol import Engine
from kit.errors import CheckpointError
from kit.files import complete_file, partial_name, publish
from kit.specs.validation import SPEC, Within
from kit.training.checkpoint import random_state
from kit.training.checkpoint.counters import Counters, RunLength
from kit.training.checkpoint.fetch import fetch
from kit.training.checkpoint.files import (
    FileRecord,
    Files,
    OtherVersionError,
    read_sealed,
    record_of,
    refuse_unlisted,
    sealed,
    verify,
    write_json,
)
from kit.training.checkpoint.remote import RemoteCheckpoints
from kit.training.checkpoint.storage import kept, require_disk_space

MANIFEST = "manifest.json"
STATE = "state"
_RANDOM = "random"
_SPACE_MARGIN = 1.05
"""Free space that a checkpoint needs, over the size of the previous one. The rest is for manifests and the file
system."""
_FORMAT = "kit-native"
_VERSION = 3
"""Version of the manifest. Version 2 had no hash of itself."""
_LARGEST_WORLD = 1 << 24
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``. Raises ValueError if it does not list all files that kit writes."""

    __pydantic_config__ = SPEC
    plan_hash: Annotated[str, Field(min_length=1)]
    world_size: Annotated[int, Within(ge=1, le=_LARGEST_WORLD)]
    model: str
    """Engine and digest of the model. An engine with ``fits_every_layout`` compares this only, not the plan's hash."""
    counters: Counters
    files: Files

    def __post_init__(self) -> None:
        if not any(name.startswith(f"{STATE}/") for name in self.files):
            raise ValueError(f"it lists no file of {STATE}/")
        generators = {name for name in self.files if name.startswith(f"{_RANDOM}/")}
        if generators not in (set(), {f"{_RANDOM}/{random_state.file_name(rank)}" for rank in range(self.world_size)}):
            raise ValueError(f"{_RANDOM}/ must have one file for each of {self.world_size} ranks")


@dataclass(frozen=True)
class NativeCheckpoints:
    """The native checkpoints of one run. Every method that takes an engine is collective."""

    root: Path
    plan_hash: str
    world_size: int
    keep_last: int
    model: str = ""
    """``model`` of the manifest. Empty: load only checkpoints of the same plan."""
    keep_every_steps: int | None = None
    """Never remove checkpoints of steps that are multiples of this number."""
    expected_bytes: int = 0
    """Expected size of the first checkpoint. Each later checkpoint is expected to be as large as the previous one."""
    length: RunLength | None = None
    """Allowed counters of this run; None: do not check counters."""
    remote: RemoteCheckpoints | None = None
    """Copies of the checkpoints in object storage."""
    log: Callable[[str], None] = print
    """Called on the main rank with messages for the user."""

    def steps(self) -> list[int]:
        """Steps that have a checkpoint directory, newest first. Does not check the checkpoints."""
        if not self.root.is_dir():
            return []
        matches = [_NAME.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir()]
        return sorted((int(match.group(1)) for match in matches if match), reverse=True)

    def directory(self, step: int) -> Path:
        """Directory of a step's checkpoint."""
        return self.root / f"step-{step:08d}"

    def save(self, engine: Engine, counters: Counters) -> None:
        """Write a checkpoint, then remove the checkpoints that need not be kept.

        Raises CheckpointError on every rank, for example on a full disk; older checkpoints then remain.
        """
        self.write(engine.save, counters, engine.is_main, random=random_state.capture())

    def bytes_of(self, step: int) -> int | None:
        """Size of a checkpoint's files in bytes; None if its manifest cannot be read."""
        try:
            return sum(record.bytes for record in read_manifest(self.directory(step)).files.values())
        except CheckpointError:
            return None

    def write(
        self,
        save: Callable[[Path], None],
        counters: Counters,
        is_main: bool,
        group: dist.ProcessGroup | None = None,
        random: random_state.RandomState | None = None,
    ) -> None:
        """Write a checkpoint, and remove those that need not be kept. The argument ``save`` writes the engine's files,
        collectively over ``group``.

        ``random``: this rank's random state at the time of the engine's state."""
        directory = self.directory(counters.step)
        partial = partial_name(directory)
        doing = f"writing the checkpoint {directory}"
        try:
            run_collectively(is_main, lambda: self._start(partial), doing, group=group)
            # On a full disk an engine may raise any exception (torch.save: RuntimeError).
            run_collectively(True, lambda: _fill(partial, save, random), doing, failures=(Exception,), group=group)
            records = run_collectively(True, lambda: _my_records(partial), doing, group=group)
            files = {name: record for share in records for name, record in sorted(share.items())}
            manifest = Manifest(self.plan_hash, self.world_size, self.model, counters, files)
            run_collectively(is_main, lambda: self._publish(partial, directory, manifest), doing, group=group)
        except CheckpointError:
            if is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def load_newest(self, engine: Engine) -> Counters | None:
        """Load the newest good checkpoint of the local directory and of ``remote``, and return its counters; None if
        there is no checkpoint. Of one step the local one comes first. A remote one is copied here.

        Renames a damaged checkpoint to ``….damaged``, and tries the previous one. Raises CheckpointError if all are
        damaged, or if the newest is of another plan or world size.
        """
        candidates = run_collectively(engine.is_main, self._candidates, f"reading {self.root}")[0]
        damage: list[str] = []
        for step, is_remote in candidates:
            directory = self.directory(step)
            try:
                if is_remote:
                    self._fetch(engine, directory.name)
                manifest = self._verified(engine, directory)
            except _DamagedError as error:
                damage.append(str(error))
                rename = functools.partial(_set_aside, directory)
                run_collectively(engine.is_main, rename, f"renaming {directory}")
                if engine.is_main:
                    place = f" in {self.remote.address}" if self.remote and is_remote else ""
                    self.log(f"checkpoint {directory.name}{place} is not usable: {error}; trying the one before it")
                continue
            _load(engine, directory, manifest)
            return manifest.counters
        if damage:
            raise CheckpointError(
                f"no checkpoint in {self.root} is usable ({damage[0]}); "
                f"resume from an exchange checkpoint, or start in a new run directory"
            )
        return None

    def _candidates(self) -> list[tuple[int, bool]]:
        """(step, whether it is the remote one) of all checkpoints, the best first.

        Raises CheckpointError if the storage cannot be read and nothing is here: a run would begin again from nothing.
        """
        local = self.steps()
        try:
            remote = self.remote.steps() if self.remote else []
        except CheckpointError as error:
            if not local:
                raise
            self.log(f"resuming from the local checkpoints only: {error}")
            remote = []
        both = [*((step, False) for step in local), *((step, True) for step in remote)]
        return sorted(both, key=lambda each: (-each[0], each[1]))

    def _fetch(self, engine: Engine, name: str) -> None:
        assert self.remote is not None
        if engine.is_main:
            self.log(f"copying {name} from {self.remote.address}")
        try:
            fetch(self.remote, name, self.root, engine.is_main)
        except CheckpointError as error:
            raise _DamagedError(str(error)) from error

    def load(self, engine: Engine, directory: Path) -> Counters:
        """Load one checkpoint, of this run or another. Raises CheckpointError if it is damaged; also if it is of
        another plan or world size, unless the engine reads every layout of the model."""
        try:
            manifest = self._verified(engine, directory)
        except _DamagedError as error:
            raise CheckpointError(f"{error}; use an earlier checkpoint or --resume auto") from error
        _load(engine, directory, manifest)
        return manifest.counters

    def _start(self, partial: Path) -> None:
        """Check the free space first, before time is spent on writing, and create the empty directories."""
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed attempt
        before = next((size for size in map(self.bytes_of, self.steps()) if size is not None), None)
        require_disk_space(self.root, int((before or self.expected_bytes) * _SPACE_MARGIN))
        (partial / STATE).mkdir(parents=True)
        (partial / _RANDOM).mkdir()

    def _verified(self, engine: Engine, directory: Path) -> Manifest:
        """Check manifest and files; returns the manifest. Each rank hashes its share of the files, and all ranks raise
        or return together."""
        reading = f"reading {directory}"
        try:
            manifest = run_collectively(engine.is_main, lambda: read_manifest(directory), reading)[0]
            run_collectively(
                True, lambda: verify(directory, dict(split_over_ranks(sorted(manifest.files.items())))), reading
            )
        except ForeignError:
            raise
        except CheckpointError as error:
            raise _DamagedError(str(error)) from error
        run_collectively(engine.is_main, lambda: refuse_unlisted(directory, {*manifest.files, MANIFEST}), reading)
        if (length := self.length) is not None:
            same_plan = manifest.plan_hash == self.plan_hash
            run_collectively(engine.is_main, lambda: length.check(manifest.counters, directory, same_plan), reading)
        if engine.fits_every_layout and self.model and manifest.model == self.model:
            return manifest
        if manifest.plan_hash != self.plan_hash:
            raise ForeignError(
                f"{directory} was written under plan {manifest.plan_hash[:12]} and this is {self.plan_hash[:12]}; "
                f"native checkpoints fit one plan: resume from an exchange checkpoint (exchange-step-…) of that run "
                f"instead; kit train THAT_RUN --resume auto --stop-at-step {manifest.counters.step} writes one",
                manifest.counters.step,
            )
        return manifest

    def _publish(self, partial: Path, directory: Path, manifest: Manifest) -> None:
        contents = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(manifest)}
        write_json(partial / MANIFEST, sealed(contents))
        # The run has repeated this step after it resumed from an older checkpoint: replace the old directory.
        _remove(directory)
        publish(partial, directory)
        with complete_file(self.root / "latest") as latest:
            latest.write(f"{directory.name}\n".encode())
        there = self.steps()
        for step in sorted(set(there) - set(kept(there, self.keep_last, self.keep_every_steps))):
            _remove(self.directory(step))


class ForeignError(CheckpointError):
    """A checkpoint is not damaged, but is of another plan, world size or version of kit."""

    def __init__(self, words: str, step: int = 0) -> None:
        super().__init__(words)
        self.step = step


class _DamagedError(Exception):
    """A checkpoint has no manifest, or its files differ from the manifest. An older checkpoint may be good."""


def _fill(partial: Path, save: Callable[[Path], None], random: random_state.RandomState | None) -> None:
    save(partial / STATE)
    if random is not None:
        random_state.write(random, partial / _RANDOM, rank())


def _load(engine: Engine, directory: Path, manifest: Manifest) -> None:
    """Load the engine's state; and the random generators if the checkpoint has them and the world size is equal."""
    run_collectively(True, lambda: engine.load(directory / STATE), f"reading {directory}")
    if manifest.world_size == (dist.get_world_size() if dist.is_initialized() else 1) and any(
        name.startswith(f"{_RANDOM}/") for name in manifest.files
    ):
        run_collectively(True, lambda: random_state.read(directory / _RANDOM, rank()), f"reading {directory}")


def _my_records(partial: Path) -> dict[str, FileRecord]:
    files = split_over_ranks(sorted(path for path in partial.rglob("*") if path.is_file()))
    return {str(path.relative_to(partial)): record_of(path) for path in files}


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises CheckpointError if it is missing, damaged or incomplete, or has fields that
    kit does not write; ForeignError if another version of kit wrote it."""
    path = directory / MANIFEST
    try:
        return read_sealed(path, Manifest, _FORMAT, _VERSION)
    except OtherVersionError as error:
        match = _NAME.fullmatch(directory.name)
        raise ForeignError(
            f"{error}; resume from an exchange checkpoint (exchange-step-…) of that run, or go on with the kit that "
            f"wrote it",
            int(match[1]) if match else 0,
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error}); copy the checkpoint again, complete") from error


def _renamed(directory: Path, name: str) -> Path:
    """Rename a directory within its parent; replaces an existing directory of that name. Returns the new path."""
    target = directory.with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    return directory.rename(target)


def _set_aside(directory: Path) -> None:
    if directory.exists():
        _renamed(directory, f"{directory.name}.damaged")


def _remove(directory: Path) -> None:
    """Remove a directory. Renames it first, so that a kill cannot leave a partial checkpoint under its name."""
    if directory.exists():
        shutil.rmtree(_renamed(directory, f".{directory.name}.removed"))
