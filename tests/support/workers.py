"""Pools of gloo processes for tests: imports are paid once, process groups are rebuilt for every case.

    results = pool("megatron", 2).run(case, argument, timeout_s=60)     # [result of rank 0, result of rank 1]

A case is a function that a fresh process can import (so defined at the top level of a test module) and
arguments that pickle. All workers of a session are forks of one process, which has imported the engines and has no
second thread. Around each case a worker initialises ``torch.distributed`` and afterwards destroys what the case left
behind. An exception on any rank, a dead rank and a case that takes too long all raise
``WorkerError`` with what the ranks had to say; the pool is then killed, and the next case starts a new one.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

START_TIMEOUT_S = 120
"""The first pool waits for the imports, about 9 CPU seconds; on a busy machine much more."""
GRACE_S = 5
"""How long the other ranks may still report after one has failed; most hang in a collective by then."""


IMPORTED = (
    "tests.support.uncollected",
    "kit.engines.torch.engine",
    "kit.engines.deepspeed.engine",
    "kit.engines.megatron.cpu",
)
"""What the process imports that workers are forked from; megatron's table of patches is installed in workers alone."""
AT_IMPORT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
"""Read when torch and deepspeed are imported."""


class WorkerError(AssertionError):
    """A case failed on some rank, or did not end in time."""


class Pool:
    """``world_size`` processes of one engine, kept between cases."""

    def __init__(self, engine: str, world_size: int) -> None:
        self._engine, self._world_size = engine, world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """``function(*args)`` on every rank; the results in rank order."""
        self._start()
        with tempfile.TemporaryDirectory(prefix="kit-store-") as directory:
            case = pickle.dumps(
                (function, args, os.path.join(directory, "store"), os.environ.get("PYTEST_CURRENT_TEST", ""))
            )
            for connection in self._connections:
                connection.send_bytes(case)
            return self._collect(f"{function.__module__}.{function.__qualname__}", timeout_s)

    def close(self) -> None:
        """Kill the processes; ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.close()
        context = multiprocessing.get_context("forkserver")
        _start_fork_server()
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            # Not daemonic: megatron's dist_checkpointing starts a Manager process of its own.
            process = context.Process(target=_serve, args=(theirs, self._engine, rank, self._world_size))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect(f"start of {self._engine} workers", START_TIMEOUT_S)

    def _collect(self, what: str, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < self._world_size:
            pending = {
                self._connections[rank]: rank
                for rank in range(self._world_size)
                if rank not in results and rank not in failures
            }
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                try:
                    ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process died"
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(results) == self._world_size:
            return [results[rank] for rank in range(self._world_size)]
        silent = [rank for rank in range(self._world_size) if rank not in results and rank not in failures]
        self.close()
        report = [f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())]
        if silent:
            report.append(f"ranks {silent} said nothing" + ("" if failures else f" within {timeout_s} s"))
        raise WorkerError(f"{what} failed\n" + "\n".join(report))


def _start_fork_server() -> None:
    """Once a session; what it inherits of our environment is every worker's."""
    forkserver.set_forkserver_preload([*IMPORTED])
    given = AT_IMPORT | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_pools: dict[tuple[str, int], Pool] = {}


def pool(engine: str, world_size: int) -> Pool:
    """The session's pool for an engine (``torch``, ``deepspeed``, ``megatron``) and a world size."""
    if not _pools:
        atexit.register(_close_all)
    return _pools.setdefault((engine, world_size), Pool(engine, world_size))


def _close_all() -> None:
    for each in _pools.values():
        each.close()


def _serve(connection: Connection, engine: str, rank: int, world_size: int) -> None:
    """A worker's life: prepare, then answer cases until the parent goes away."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # the store is a file; some engines only look whether the variable exists
    }
    _answer(connection, lambda: _prepare(engine))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        _answer(connection, lambda message=message: _case(message, rank, world_size))


def _answer(connection: Connection, work: Callable[[], Any]) -> None:
    try:
        reply = pickle.dumps((True, work()))
    except BaseException:
        reply = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(reply)


def _prepare(engine: str) -> None:
    import torch

    torch.set_num_threads(1)
    _share_gloo_loop()
    if engine == "megatron":
        from kit.engines.megatron.cpu import install

        install()
    gc.freeze()  # half a million objects of the imports, which no collection need look at
    gc.enable()


def _share_gloo_loop() -> None:
    """One polling thread for all groups of a process, instead of one each.

    A group's own wakes a hundred times a second, and engines keep their groups after a case (in cycles through C++,
    which Python cannot collect): hundreds of them take a third of a core from everyone, doing nothing.
    """
    from torch.distributed import distributed_c10d

    class OnOneDevice(distributed_c10d.ProcessGroupGloo):
        device = distributed_c10d.ProcessGroupGloo.create_default_device()

        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **_: Any) -> None:
            # torch 2.14 also says whether a group may be reconfigured, which none here is.
            options = distributed_c10d.ProcessGroupGloo._Options()
            options._devices, options._timeout = [self.device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice


def _case(message: bytes, rank: int, world_size: int) -> Any:
    import torch.distributed as dist

    function, args, store, test = pickle.loads(message)
    measured_for(test)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        dist.barrier()  # a rank whose case has no collective would be gone before the other has connected to it
        return function(*args)
    finally:
        _tear_down()
        measured_for("")


def measured_for(test: str) -> None:
    """Where coverage.py measures, lines count for this test from now on; a worker's end would save nothing."""
    if (coverage := sys.modules.get("coverage")) and (measuring := coverage.Coverage.current()):
        measuring.switch_context(test)
        if not test:
            measuring.save()


_destroyed: list[Any] = []
"""Groups of the last case. A thread of gloo whose callback lets go of its own group last would wait for its own end,
which aborts the process ("Resource deadlock avoided"); at the end of the next case it has done so long ago."""


def _tear_down() -> None:
    """Destroy every process group, and the module globals in which engines remember them."""
    import torch.distributed as dist

    _destroyed[:] = dist.distributed_c10d._world.pg_map
    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()
    if moe := sys.modules.get("megatron.core.transformer.moe.moe_logging"):  # of megatron-core 0.19: sizes of a model
        moe.destroy_moe_metrics_tracker()
    dist.destroy_process_group()
    if comm := sys.modules.get("deepspeed.comm.comm"):
        comm.cdb = None  # otherwise the next init_distributed believes that it has a group
