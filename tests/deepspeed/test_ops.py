"""Locks around builds of ops: a living builder's is respected, a killed builder's is gone; and where ops are kept."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading

import pytest
from torch.utils import cpp_extension

from kit.engines.deepspeed import ops

HOLD = """
import sys, time
from kit.engines.deepspeed.ops import BuildLock
lock = BuildLock(sys.argv[1])
assert lock.try_acquire()
print("held", flush=True)
time.sleep(600)
"""
"""Another process takes the lock, says so, and would keep it."""


@pytest.fixture
def lock(tmp_path):
    """Path of torch's lock file; a process that was killed outside of kit has left it."""
    path = tmp_path / "lock"
    path.touch()
    return path


@pytest.fixture
def builder(lock):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    assert b"held\n" in iter(process.stdout.readline, b"")
    yield process
    process.kill()
    process.wait()


def test_torch_builds_under_this_lock(monkeypatch):
    monkeypatch.setattr(cpp_extension, "FileBaton", None)
    ops.prepare_builds()
    assert cpp_extension.FileBaton is ops.BuildLock
    assert "FileBaton(os.path.join(build_directory, 'lock'))" in inspect.getsource(cpp_extension._jit_compile)


def test_a_living_builders_lock_is_respected(lock, builder):
    waiting = ops.BuildLock(str(lock))
    assert not waiting.try_acquire()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    thread.join(timeout=0.5)
    assert thread.is_alive()
    builder.kill()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_a_killed_builders_lock_is_gone(lock, builder):
    builder.kill()
    builder.wait()
    assert ops.BuildLock(str(lock)).try_acquire()


def test_who_is_done_lets_the_next_one_build(lock):
    first, second = ops.BuildLock(str(lock)), ops.BuildLock(str(lock))
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()


def test_each_environment_keeps_its_own_ops(tmp_path, monkeypatch):
    """Another environment's are other headers': found here they would be compiled anew, and that one's undone."""
    found = []
    for name in ("one", "two"):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        (tmp_path / name).mkdir()
        monkeypatch.setattr(sys, "prefix", str(tmp_path / name))
        assert not ops.library().exists()
        found.append(ops.library().parents[1])
    assert found == [tmp_path / name / "torch_extensions" for name in ("one", "two")]


def test_a_folder_that_was_named_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    ops.prepare_builds()
    assert ops.library().parents[1] == tmp_path
