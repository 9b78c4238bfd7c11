"""One rank of a small data-parallel job that fails in a chosen way; started by torchrun.

A plain torch loop on purpose: the doctor reads anybody's logs.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kit.training.__main__ import leave
from tests.system.failures import memory

STEPS = {"diverges": 24}
"""Where more than six are needed."""
FAULT_AT = 3
TIMEOUT_S = 8


def record(directory: Path) -> None:
    """Write what this rank knows of its collectives, as NCCL's watchdog makes every rank do when one times out."""
    data = torch._C._distributed_c10d._dump_fr_trace()
    (directory / f"flight_{dist.get_rank()}").write_bytes(data)


def main() -> None:
    """Train a matrix for a few steps; the fault comes at step ``FAULT_AT``, on the last rank."""
    fault, directory = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    weight = torch.nn.Linear(16, 16)
    rate = 0.01
    for step in range(1, STEPS.get(fault, 6) + 1):
        begin = time.perf_counter()
        here = step == FAULT_AT and rank == last
        if here and fault == "killed":
            os.kill(os.getpid(), 9)
        if here and fault == "downloads":
            print("Downloading shards:  12%|#2        | 3/25 [03:10<23:20, 63.6s/it]", flush=True)
            time.sleep(3 * TIMEOUT_S)
        if rank == last and step >= FAULT_AT and fault == "slow":
            time.sleep(0.5)
        loss = weight(torch.randn(4, 16)).square().mean()
        loss.backward()
        if here and fault == "nan":
            for parameter in weight.parameters():
                parameter.data.fill_(float("nan"))
        if fault == "diverges" and step > 12:
            rate = 9.0  # far above what the curvature allows: the loss grows from step to step
        if here and fault in memory.PHASES:
            memory.PHASES[fault]()
        if here and fault == "missing-op":
            from torch.utils.cpp_extension import load_inline

            os.environ["CXX"] = "no-such-compiler"
            load_inline("async_io", "int one() { return 1; }", functions="one", build_directory=str(directory))
        if step == FAULT_AT and fault == "each-other":
            dist.recv(torch.empty(16), src=last - rank)  # both stages receive first
        if fault == "dead-node":
            time.sleep(0.5)
        work_s = time.perf_counter() - begin
        for parameter in weight.parameters():
            gradient = parameter.grad
            assert gradient is not None
            if here and fault == "mismatched" and gradient.dim() == 2:
                gradient = torch.zeros(8)
            if here and fault == "skipped":
                time.sleep(0.7 * TIMEOUT_S)  # busy with something that the others do not do
                record(directory)
                time.sleep(2.3 * TIMEOUT_S)
            try:
                dist.all_reduce(gradient)
            except RuntimeError:
                record(directory)
                raise
            parameter.data -= rate * parameter.grad  # type: ignore[operator]
            parameter.grad = None
        if here and fault == "disk-full":
            with (directory / "checkpoint.bin").open("wb") as stream:
                stream.write(bytes(64 << 20))
        sys.stdout.write(f"[rank{rank}] step {step} loss {loss.item():.4f} work_time_s {work_s:.4f}\n")
        sys.stdout.flush()
    if fault == "data":
        raise StopIteration("the data set has no more batches")
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
