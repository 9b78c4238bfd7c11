"""One rank of a small data-parallel job that fails in a chosen way; started by torchrun.

A plain torch loop on purpose: the doctor reads anybody's logs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kit.training.__main__ import leave
from tests.system.failures import memory

STEPS = 6
FAULT_AT = 3
TIMEOUT_S = 8


def record(directory: Path) -> None:
    """Write what this rank knows of its collectives, as NCCL's watchdog makes every rank do when one times out."""
    (directory / f"flight_{dist.get_rank()}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())


def download() -> None:
    """As a hub's client tells of it."""
    print("Downloading shards:  12%|#2        | 3/25 [03:10<23:20, 63.6s/it]", flush=True)
    time.sleep(3 * TIMEOUT_S)


def compile_without_a_compiler() -> None:
    """As DeepSpeed compiles its operators."""
    from torch.utils.cpp_extension import load_inline

    os.environ["CXX"] = "no-such-compiler"
    load_inline("async_io", "int one() { return 1; }", functions="one", build_directory=sys.argv[2])


def be_busy() -> None:
    """With something that the others do not do."""
    time.sleep(0.7 * TIMEOUT_S)
    record(Path(sys.argv[2]))
    time.sleep(2.3 * TIMEOUT_S)


def receive_first() -> None:
    """As two pipeline stages that both do."""
    dist.recv(torch.empty(16), src=1 - dist.get_rank())


ACTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), 9),
    "downloads": download,
    "missing-op": compile_without_a_compiler,
    "skipped": be_busy,
    "disk-full": lambda: Path(sys.argv[2], "checkpoint.bin").write_bytes(bytes(64 << 20)),
    "each-other": receive_first,
    **memory.PHASES,
}
"""What the last rank does at step ``FAULT_AT``, between backward and the collectives; "each-other" is of both."""


def main() -> None:
    """Train a matrix for a few steps; the fault comes at step ``FAULT_AT``, on the last rank."""
    fault, directory = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    layer = torch.nn.Linear(16, 16)
    for step in range(1, STEPS + 1):
        here = step == FAULT_AT and (rank == last or fault == "each-other")
        loss = layer(torch.randn(4, 16)).square().mean()
        loss.backward()
        if here and fault in ACTS:
            ACTS[fault]()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            odd = here and fault == "mismatched" and parameter.dim() == 2
            try:
                dist.all_reduce(torch.zeros(8) if odd else parameter.grad)
            except RuntimeError:
                record(directory)
                raise
            parameter.data -= 0.01 * parameter.grad
            parameter.grad = None
        print(f"[rank{rank}] step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
