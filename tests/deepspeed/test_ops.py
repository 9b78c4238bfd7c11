"""Locks around builds of ops: a living builder's is respected, a killed builder's is gone; and where ops are kept."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
from torch.utils import cpp_extension

from kit.engines.deepspeed import build, nvme, ops
from kit.errors import EngineError
from tests.deepspeed import cases
from tests.support.alone import process_group_of_one
from tests.support.files import file_with
from tests.support.refusals import refusal

HOLD = """
import fcntl, sys, time
file = open(f"{sys.argv[1]}.kit", "w")
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
time.sleep(600)
"""
"""Another process takes the lock, says so, and would keep it."""


@pytest.fixture
def lock(tmp_path):
    """Path of torch's lock file; a process that was killed outside of kit has left it."""
    return file_with(tmp_path / "lock", "")


@pytest.fixture
def builder(lock):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    assert b"held\n" in iter(process.stdout.readline, b"")
    yield process
    process.kill()
    process.wait()


def test_torch_builds_under_this_lock(monkeypatch):
    monkeypatch.setattr(cpp_extension, "FileBaton", None, raising=False)
    ops.prepare_builds()
    assert cpp_extension.FileBaton is ops.BuildLock
    source = inspect.getsource(cpp_extension._jit_compile)
    of_the_kernel = "FileLock(os.path.join(build_directory, 'lock'))" in source  # of torch 2.15, which needs no other
    assert of_the_kernel or "FileBaton(os.path.join(build_directory, 'lock'))" in source


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


@pytest.mark.parametrize(
    ("named", "read"),
    [("9.0a", "9.0+PTX"), ("8.0 10.0f", "8.0;10.0+PTX"), ("12.0a+PTX", "12.0+PTX"), ("8.6;9.0+PTX", "8.6;9.0+PTX")],
)
def test_deepspeed_reads_the_architectures_that_an_image_names(named, read, monkeypatch):
    """``9.0a`` is what images for Hopper set, and DeepSpeed ends with ValueError: invalid literal for int()."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    ops.prepare_builds()
    builder = FusedAdamBuilder()
    builder.jit_mode = True
    builder.compute_capability_args()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == read


def test_a_build_that_fails_says_its_first_line_and_what_it_needs(monkeypatch):
    monkeypatch.setattr(ops.AsyncIOBuilder, "is_compatible", lambda self, verbose: True)

    def load(self, verbose):
        raise RuntimeError("\ng++ is gone\nand so on")

    monkeypatch.setattr(ops.AsyncIOBuilder, "load", load)
    assert "could not be built (g++ is gone); it needs g++ and ninja" in refusal(EngineError, ops.load_async_io)
    monkeypatch.setattr(ops, "load_async_io", lambda: load(None, False))
    assert ops.compile_all() == {"async_io": "g++ is gone"}
    monkeypatch.setattr(ops, "load_async_io", lambda: None)
    assert 0 <= ops.compile_all()["async_io"] < 1


OTHER = "/mnt/other"


def test_swap_files_go_to_the_runs_own_folder_unless_edited_and_each_rank_removes_its_own(tmp_path, monkeypatch):
    chosen = cases.plan(3, offload_optimizer="nvme", offload_param="nvme")
    keys = {"ds_config.json": "offload_param", "accelerate.yaml": "offload_optimizer"}
    edits = [SimpleNamespace(file=file, key=f"zero_optimization.{key}.nvme_path") for file, key in keys.items()]
    run = SimpleNamespace(plan=chosen, run=SimpleNamespace(nvme_path=str(tmp_path)), path=tmp_path / "run", edits=edits)
    section = {"device": "nvme", "nvme_path": OTHER}
    zero = {"offload_optimizer": dict(section), "offload_param": dict(section)}
    for name in ("require", "check_nvme"):
        monkeypatch.setattr(nvme, name, lambda *_: None)
    monkeypatch.setattr(nvme.ops, "load_async_io", lambda: None)
    with process_group_of_one():
        nvme.prepare_swapping(run, {"zero_optimization": zero})
        folder = Path(zero["offload_optimizer"]["nvme_path"])
        for rank in (0, 1):
            (folder / "zero_stage_3" / "optimizer" / f"rank{rank}" / "more").mkdir(parents=True)
        nvme.remove_swap_files(run)
        assert [path.name for path in folder.glob("*/*/*")] == ["rank1"]
        shutil.rmtree(folder / "zero_stage_3" / "optimizer" / "rank1")
        nvme.remove_swap_files(run)
    assert folder.parent == tmp_path
    assert not folder.exists()
    assert zero["offload_param"]["nvme_path"] == OTHER


def test_a_process_that_no_launcher_started_gets_the_variables_of_one(monkeypatch):
    """zero.Init reads LOCAL_RANK; where one is missing DeepSpeed searches for MPI."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with process_group_of_one():
        for name in names:
            monkeypatch.delenv(name, raising=False)
        build._complete_environment()
        assert {name: os.environ[name] for name in names} == names
