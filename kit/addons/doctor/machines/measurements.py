"""Programs that measure a host and print JSON; ``bandwidth`` starts them on each host.

python -m kit.addons.doctor.machines.measurements disk PATH BYTES
python -m kit.addons.doctor.machines.measurements collectives BYTES SECONDS
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

BLOCK_BYTES = 8 << 20
ROUNDS_AT_LEAST = 3


def disk_speed(directory: Path, size_bytes: int) -> dict[str, float]:
    """GB/s written and read with direct I/O, in blocks of 8 MiB, one after another.

    DeepSpeed's asynchronous I/O has more requests in flight, so this is a lower bound: close for one drive, too low for
    several. Raises OSError, also if the file system refuses direct I/O."""
    block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to a page, as direct I/O asks
    block.write(os.urandom(1 << 20) * (BLOCK_BYTES >> 20))
    blocks = max(1, size_bytes // BLOCK_BYTES)
    with (
        tempfile.NamedTemporaryFile(dir=directory, prefix=".kit-doctor-") as file,
        open(os.open(file.name, os.O_RDWR | os.O_DIRECT), "r+b", buffering=0) as disk,
    ):
        begin = time.perf_counter()
        for _ in range(blocks):
            disk.write(block)
        os.fsync(disk)
        written = time.perf_counter() - begin
        disk.seek(0)
        begin = time.perf_counter()
        for _ in range(blocks):
            disk.readinto(block)
        read = time.perf_counter() - begin
    return {"write": blocks * BLOCK_BYTES / written / 1e9, "read": blocks * BLOCK_BYTES / read / 1e9}


def measure_collectives(size_bytes: int, seconds: float) -> None:
    """Runs one rank (torchrun's environment): all-reduce and all-gather inside a node, and over all ranks.

    Rank 0 prints JSON: bus bandwidths in GB/s, as in nccl-tests. Uses NCCL on GPUs, otherwise gloo."""
    import torch
    import torch.distributed as dist

    on_gpus = torch.cuda.is_available()
    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(local)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    node_groups = [dist.new_group(list(range(first, first + per_node))) for first in range(0, world, per_node)]
    found: dict[str, float] = {}
    for where, group, size in (("inside", node_groups[rank // per_node], per_node), ("between", None, world)):
        if size == 1 or (where == "between" and world == per_node):
            continue
        whole = torch.zeros(size_bytes // 4 // size * size, device=device)
        part = torch.zeros(whole.numel() // size, device=device)
        moved = (size - 1) / size * whole.numel() * 4
        for name, collective, volume in (
            ("all_reduce", partial(dist.all_reduce, whole, group=group), 2 * moved),
            ("all_gather", partial(dist.all_gather_into_tensor, whole, part, group=group), moved),
        ):
            found[f"{name}_{where}"] = volume / _seconds_each(collective, seconds) / 1e9
    if on_gpus:
        found |= _host_copies(seconds)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a process that finalises


def _seconds_each(act: Callable[[], object], seconds: float) -> float:
    """Mean seconds of a collective or a copy, after a warm-up. Rank 0 decides the number of rounds for all ranks."""
    import torch
    import torch.distributed as dist

    def timed(rounds: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(rounds):
            act()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / rounds

    timed(1)
    rounds = torch.tensor([max(ROUNDS_AT_LEAST, min(200, int(seconds / max(timed(1), 1e-6))))])
    if torch.cuda.is_available():
        rounds = rounds.cuda()
    dist.broadcast(rounds, 0)
    return timed(int(rounds.item()))


def _host_copies(seconds: float) -> dict[str, float]:
    """GB/s of pinned copies to the device and back, which offload uses."""
    import torch

    host = torch.zeros(64 << 20, pin_memory=True)
    there = torch.zeros_like(host, device="cuda")
    copies = {"host_to_device": (there, host), "device_to_host": (host, there)}
    return {
        name: host.numel() * 4 / _seconds_each(partial(to.copy_, source, non_blocking=True), seconds) / 1e9
        for name, (to, source) in copies.items()
    }


if __name__ == "__main__":
    if sys.argv[1] == "disk":
        print(json.dumps(disk_speed(Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        measure_collectives(int(sys.argv[2]), float(sys.argv[3]))
