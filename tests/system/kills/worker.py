"""What a forked rank runs. Importing this module imports the engines, which is what a fork saves; megatron-core apart,
which comes after its patches for the CPU (``kit.training.__main__``)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

import kit.engines.deepspeed.engine
import kit.engines.torch.engine
import kit.training.loop  # noqa: F401
from kit.training.__main__ import leave, main


def rank_main(rundir: str, words: tuple[str, ...], rank: int, world_size: int, port: int) -> None:
    """One rank, to its end."""
    log = os.open(Path(rundir) / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.chdir(rundir)
    torch.set_num_threads(1)
    leave(main([".", *words]))
