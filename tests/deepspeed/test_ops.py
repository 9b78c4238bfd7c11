"""Lock files of builds that were killed, beside those of builds that live; torch's own baton takes and leaves them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from torch.utils.file_baton import FileBaton

from kit.engines.deepspeed import ops
from kit.errors import EngineError

HOLD = """
import sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
baton.try_acquire()
print(flush=True)
time.sleep(600)
"""
"""Another process takes torch's lock, says so, and would keep it."""


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """A process that holds the lock of an op, in folders that look an hour old."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    process.stdout.readline()
    assert lock.exists()
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - 3600,) * 2)
    yield process, lock
    process.kill()
    process.wait()


def test_a_living_builders_lock_stays(builder):
    _, lock = builder
    ops.remove_dead_locks()
    assert lock.exists()


def test_a_killed_builders_lock_is_removed(builder, capsys):
    process, lock = builder
    process.kill()
    process.wait()
    ops.remove_dead_locks()
    assert not lock.exists()
    assert str(lock) in capsys.readouterr().err
    assert FileBaton(str(lock)).try_acquire()  # what torch does next


def test_a_lock_of_a_moment_ago_is_watched_first(builder, monkeypatch):
    process, lock = builder
    process.kill()
    process.wait()
    os.utime(lock)
    monkeypatch.setattr(ops, "SILENT_S", 2)
    begin = time.monotonic()
    ops.remove_dead_locks()
    assert not lock.exists()
    assert time.monotonic() - begin > 1


def test_where_other_machines_build_too_a_person_is_asked(builder, monkeypatch):
    process, lock = builder
    process.kill()
    process.wait()
    monkeypatch.setattr(ops, "_is_shared", lambda file: True)
    with pytest.raises(EngineError, match=f"{lock}.*minutes older.*remove that file"):
        ops.remove_dead_locks()
    assert lock.exists()


def test_each_environment_keeps_its_own_ops(tmp_path, monkeypatch):
    """Another environment's are other headers': found here they would be compiled anew, and that one's undone."""
    found = []
    for name in ("one", "two"):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        (tmp_path / name).mkdir()
        monkeypatch.setattr(sys, "prefix", str(tmp_path / name))
        assert not ops.is_built()
        found.append(ops._builds())
    assert found == [tmp_path / name / "torch_extensions" for name in ("one", "two")]


def test_a_folder_that_was_named_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    ops.remove_dead_locks()
    assert ops._builds() == tmp_path
