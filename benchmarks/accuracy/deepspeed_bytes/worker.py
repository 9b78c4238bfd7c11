"""One rank of the measurement: ``python -m benchmarks.accuracy.deepspeed_bytes.worker OUT.json``, started by
torchrun."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is first imported

import torch
import torch.distributed as dist

from benchmarks.accuracy.deepspeed_bytes.cases import CASES, MODEL, SEQ_LENGTH, Case
from benchmarks.accuracy.deepspeed_bytes.measure import Held, from_now_on, held
from kit.emit.run_directory import write
from kit.engines.deepspeed.engine import DeepSpeedEngine
from kit.engines.protocol import MicroBatch
from kit.specs.run import DataSpec, RunSpec
from kit.training.__main__ import leave

LEARNING_RATE = 1e-4


def measure(case: Case, directory: Path) -> dict[str, Held]:
    """Bytes after the second backward, and after the second step."""
    run = RunSpec(data=DataSpec(train="none"), nvme_path=str(directory))
    rundir = write(case.plan, run, directory / f"rank-{dist.get_rank()}" / case.name)
    with from_now_on():
        engine = DeepSpeedEngine(rundir)
        engine.forward_backward(_batches(case, 0))
        engine.apply(LEARNING_RATE)
        engine.forward_backward(_batches(case, 1))
        after_backward = held(engine)
        engine.apply(LEARNING_RATE)
        after_step = held(engine)
        engine.close()
    return {"backward": after_backward, "step": after_step}


def _batches(case: Case, step: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    shape = (1, SEQ_LENGTH + 1)
    tokens = [torch.randint(0, MODEL.vocab_size, shape, generator=generator) for _ in range(case.accumulation)]
    return [MicroBatch(input_ids=row[:, :-1], labels=row[:, 1:]) for row in tokens]


def main() -> None:
    """Measures every case, and writes the bytes of rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(prefix="kit-bytes-") as scratch:
        found = {case.name: measure(case, Path(scratch)) for case in CASES}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=2), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
