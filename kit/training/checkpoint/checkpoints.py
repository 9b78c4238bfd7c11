"""The checkpoints of a run: written complete or not at all, the newest good one found, the old ones removed.

checkpoints/step-00000020/    a checkpoint (``manifest``)
checkpoints/latest            name of the newest, for people and scripts; loading ignores it
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from kit.engines.collective import on_all_ranks
from kit.engines.protocol import Engine
from kit.errors import CheckpointError
from kit.files import partial_name, publish, write_text
from kit.planner.plan import Plan
from kit.training.checkpoint.fetch import fetch
from kit.training.checkpoint.manifest import Checkpoint, ForeignError, Manifest
from kit.training.checkpoint.remote import RemoteCheckpoints
from kit.training.checkpoint.storage import name_of, require_disk_space, retained_steps, steps_in
from kit.training.checkpoint.store import State, check_state, load_state, write_manifest, write_state
from kit.training.counters import Counters, RunLength
from kit.units import GB

_SPACE_MARGIN = 1.05
"""Free space that a checkpoint needs, over the size of the previous one. The rest is for manifests and the file
system."""


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of one run. Every method that takes an engine is collective."""

    root: Path
    plan: Plan
    keep_last: int
    keep_every_steps: int | None = None
    """Never remove checkpoints of steps that are multiples of this number."""
    length: RunLength | None = None
    """Allowed counters of this run; None: do not check counters."""
    chat_template: str | None = None
    """By which the run's chats became tokens."""
    remote: RemoteCheckpoints | None = None
    """Copies of the checkpoints in object storage."""
    log: Callable[[str], None] = print
    """Called on the main rank with messages for the user."""

    def steps(self) -> list[int]:
        """Steps that have a checkpoint directory, newest first. Does not check the checkpoints."""
        return list(steps_in(self.root))

    def directory(self, step: int) -> Path:
        """Directory of a step's checkpoint."""
        return self.root / name_of(step)

    def bytes_of(self, step: int) -> int | None:
        """Size of a checkpoint's files in bytes; None if its manifest cannot be read."""
        try:
            return sum(record.bytes for record in Checkpoint(self.directory(step)).manifest.files.values())
        except CheckpointError:
            return None

    def write(self, state: State, counters: Counters, is_main: bool, group: dist.ProcessGroup | None = None) -> None:
        """Collective over ``group``. Write a checkpoint, then remove those that need not be kept.

        Raises CheckpointError on every rank, for example on a full disk; older checkpoints then remain.
        """
        directory, plan = self.directory(counters.step), self.plan
        partial = partial_name(directory)
        doing = f"writing the checkpoint {directory}"
        try:
            on_all_ranks(is_main, lambda: self._start(partial), doing, group=group)
            weight_map, files = write_state(state, partial, is_main, plan.model, plan.job.lora, group=group)
            manifest = Manifest(
                counters=counters,
                model=plan.model,
                files=dict(sorted(files.items())),
                weight_map=weight_map,
                kinds=state.kinds,
                optimizer=plan.job.optimizer.name,
                lora=plan.job.lora,
                chat_template=self.chat_template,
                plan_hash=plan.digest,
                world_size=plan.layout.world_size,
                scalars=state.scalars,
            )
            on_all_ranks(is_main, lambda: self._publish(partial, directory, manifest), doing, group=group)
        except CheckpointError:
            if is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def load_newest(self, engine: Engine) -> Counters | None:
        """Load the newest good checkpoint of the local directory and of ``remote``, and return its counters; None if
        there is no checkpoint. Of one step the local one comes first. A remote one is copied here.

        Renames a damaged checkpoint to ``….damaged``, and tries the previous one. Raises CheckpointError if all are
        damaged, or if the newest is of another model or version of kit.
        """
        candidates = on_all_ranks(engine.is_main, self._candidates, f"reading {self.root}")[0]
        damage: list[str] = []
        for step, is_remote in candidates:
            directory = self.directory(step)
            try:
                if is_remote:
                    self._fetch(engine, directory.name)
                checkpoint = self._verified(engine, directory)
            except _DamagedError as error:
                damage.append(str(error))
                rename = functools.partial(_set_aside, directory)
                on_all_ranks(engine.is_main, rename, f"renaming {directory}")
                if engine.is_main:
                    place = f" in {self.remote.address}" if self.remote and is_remote else ""
                    self.log(f"checkpoint {directory.name}{place} is not usable: {error}; trying the one before it")
                continue
            return self._load(engine, checkpoint)
        if damage:
            raise CheckpointError(
                f"no checkpoint in {self.root} is usable ({damage[0]}); resume from a checkpoint of another run, or "
                "start in a new run directory"
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
        """Load one checkpoint, of this run or another. Raises CheckpointError if it is damaged or of another model."""
        try:
            checkpoint = self._verified(engine, directory)
        except _DamagedError as error:
            raise CheckpointError(f"{error}; use an earlier checkpoint or --resume auto") from error
        return self._load(engine, checkpoint)

    def _start(self, partial: Path) -> None:
        """Check the free space first, before time is spent on writing, and create the empty directory."""
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed attempt
        before = next((size for size in map(self.bytes_of, self.steps()) if size is not None), None)
        needed = before or self.plan.predicted.operation.checkpoint_gb * GB
        require_disk_space(self.root, int(needed * _SPACE_MARGIN))
        partial.mkdir(parents=True)

    def _verified(self, engine: Engine, directory: Path) -> Checkpoint:
        """Check manifest and files. Each rank hashes its share of the files, and all ranks raise or return together."""
        reading, plan = f"reading {directory}", self.plan
        try:
            checkpoint = on_all_ranks(engine.is_main, lambda: Checkpoint(directory), reading)[0]
            on_all_ranks(True, lambda: checkpoint.verify(share=True), reading)
        except ForeignError:
            raise
        except CheckpointError as error:
            raise _DamagedError(str(error)) from error
        on_all_ranks(engine.is_main, checkpoint.refuse_unlisted, reading)
        check = functools.partial(check_state, checkpoint, engine.optimizer_name, plan.model, plan.job.lora)
        on_all_ranks(engine.is_main, check, reading)
        if (length := self.length) is not None:
            counters, same = checkpoint.manifest.counters, checkpoint.manifest.plan_hash == plan.digest
            on_all_ranks(engine.is_main, lambda: length.check(counters, directory, same), reading)
        return checkpoint

    def _load(self, engine: Engine, checkpoint: Checkpoint) -> Counters:
        said = checkpoint.manifest
        same = (said.plan_hash, said.world_size) == (self.plan.digest, self.plan.layout.world_size)
        if engine.is_main and not same:
            self.log(f"{checkpoint.path.name} was written under another plan: its state is spread anew")
        load_state(engine, checkpoint, same)
        return said.counters

    def _publish(self, partial: Path, directory: Path, manifest: Manifest) -> None:
        write_manifest(partial, manifest)
        # The run has repeated this step after it resumed from an older checkpoint: replace the old directory.
        _remove(directory)
        publish(partial, directory)
        write_text(self.root / "latest", f"{directory.name}\n")
        there = self.steps()
        for step in sorted(set(there) - set(retained_steps(there, self.keep_last, self.keep_every_steps))):
            _remove(self.directory(step))


class _DamagedError(Exception):
    """A checkpoint has no manifest, or its files differ from the manifest. An older checkpoint may be good."""


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
