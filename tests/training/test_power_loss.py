"""A power loss at any moment of a run: what was not flushed is gone, and what is left goes on bit for bit."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kit.specs.run import CheckpointSpec
from kit.training.checkpoint.manifest import Checkpoint
from tests.support.checkpoints import same_state
from tests.support.files import file_with
from tests.training import runs


class Disk:
    """What a disk holds of a directory: the bytes of a file as they were at its last fsync, and the names in a
    directory as they were at its last fsync."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._files, self._names = root, dict[int, bytes](), dict[int, dict[str, int]]()
        self._held: list[int] = []
        """Descriptors of all that was flushed: its inode is not given to another file."""
        self.moments: list[dict[str, bytes]] = []
        """After each fsync: path → content, of all that a power loss would leave."""
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._then_look(getattr(os, name)))

    def _then_look(self, real):
        def flush(descriptor):
            real(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not path.is_relative_to(self._root):
                return
            self._held.append(os.dup(descriptor))
            inode = os.fstat(descriptor).st_ino
            if path.is_dir():
                self._names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                self._files[inode] = path.read_bytes()
            self.moments.append(dict(self._left(self._root.stat().st_ino, "")))

        return flush

    def _left(self, inode: int, place: str):
        for name, below in self._names.get(inode, {}).items():
            if below in self._files:
                yield place + name, self._files[below]
            else:  # a directory, or a file that was never flushed
                yield from self._left(below, f"{place}{name}/")
                yield place + name, b""

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)


def put_back(left: dict[str, bytes], root: Path) -> None:
    """Write what is left into a directory; empty files stand for what was never flushed."""
    for name in sorted(left, key=lambda each: -each.count("/")):
        if not (root / name).is_dir():
            file_with(root / name, left[name])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_power_loss_leaves_whole_checkpoints(tmp_path, whole, asynchronous):
    spec = CheckpointSpec(every_steps=1, keep_last=2, asynchronous=asynchronous)
    rundir = runs.prepare(tmp_path / "run", checkpoint=spec)
    root = rundir.path / "checkpoints"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(root, patch)
        runs.run(rundir)
    disk.close()
    metrics, seen = (rundir.path / "metrics.jsonl").read_text(), {}
    for left in disk.moments:
        seen.setdefault(tuple(sorted(name for name in left if name.startswith("step-") and "/" not in name)), left)
    assert all(left["latest"].decode().strip() in left for left in disk.moments if left.get("latest"))
    assert next(iter(seen)) == ()
    assert {max(names, default="") for names in seen} >= {f"step-{step:08d}" for step in (1, 2, 3, 4, 5, 6)}
    for number, (names, left) in enumerate(seen.items()):
        put_back(left, tmp_path / str(number))
        for name in names:
            checkpoint = Checkpoint(tmp_path / str(number) / name)
            checkpoint.verify()
            checkpoint.refuse_unlisted()
    chosen = random.Random(5).choice([number for number, names in enumerate(seen) if names])
    root.rename(rundir.path / "gone")
    (tmp_path / str(chosen)).rename(root)
    resumed = max(int(path.name[5:]) for path in root.glob("step-*"))
    (rundir.path / "metrics.jsonl").write_text("".join(metrics.splitlines(True)[:resumed]))
    assert runs.resumed(rundir, None).step == 6
    assert runs.metrics(rundir) == runs.metrics(whole)
    assert same_state(*(Checkpoint(each / "step-00000006") for each in (root, rundir.path / "gone")))
