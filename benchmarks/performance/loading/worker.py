"""One rank: ``python -m benchmarks.performance.loading.worker RUN_DIR OUT.json``, started by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is first imported

import torch
import torch.distributed as dist

from benchmarks.performance.weights import report
from kit.emit.run_directory import RunDirectory
from kit.engines.base import StateKind
from kit.engines.deepspeed.engine import DeepSpeedEngine
from kit.engines.torch.engine import TorchEngine
from kit.training.__main__ import leave
from tests.support.peak_memory import Peak, return_freed_memory


def main() -> None:
    """Load, export the masters as an exchange checkpoint would, and write what both took."""
    torch.set_num_threads(1)
    return_freed_memory()
    dist.init_process_group("gloo")
    rundir = RunDirectory.open(sys.argv[1])
    with Peak() as loading:
        engine = (TorchEngine if rundir.plan.layout.engine == "torch" else DeepSpeedEngine)(rundir)
    with Peak() as exporting:
        for block in engine.export_blocks([StateKind.MASTER]):
            del block
    report({"kept": loading.kept, "loading": loading.grown, "exporting": exporting.grown}, Path(sys.argv[2]))
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
