"""What weights and moments in bf16 cost in validation loss, rounded to the nearest and stochastically, beside fp32.

    python -m benchmarks.performance.bf16_state

A small model of the bytes of the standard library's sources trains in fp32, and goes on from there at rates of
fine-tuning in each of the regimes, on the same samples. A few CPU minutes for each of the lines.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.protocol import MicroBatch
from kit.engines.torch.engine import TorchEngine
from kit.specs.job import OptimizerSpec
from tests.support import tiny

LENGTH, ROWS, HELD = 64, 8, 40
RATES = (1e-4, 1e-5)
REGIMES: dict[str, dict[str, Any]] = {
    "fp32 master weights": {},
    "bf16, to the nearest": {"optimizer_state_dtype": "bf16"},
    "bf16, stochastic": {"optimizer_state_dtype": "bf16", "bf16_stochastic_round": True},
}


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the modules: to train on, and every tenth held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 0) == held) for held in (False, True)]
    train, held = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held


def rows(data: torch.Tensor, seed: int) -> list[MicroBatch]:
    """A micro batch of random places."""
    starts = torch.randint(len(data) - LENGTH - 1, (ROWS,), generator=torch.Generator().manual_seed(seed))
    taken = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()]).long()
    return [MicroBatch(input_ids=taken[:, :-1], labels=taken[:, 1:])]


def run(
    path: Path, layout: dict[str, Any], rate: float, steps: int, start: Mapping[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """(validation loss, weights) after a run. ``start``: weights; none: random ones."""
    spec = tiny.model(hidden_size=64, ffn_hidden_size=172, num_layers=2, head_dim=16, vocab_size=256)
    job = {"precision": "bf16", "seq_length": LENGTH, "optimizer": OptimizerSpec()}
    rundir: Any = tiny.run_directory(path, tiny.plan(spec, job=job, micro_batch_size=ROWS, **layout))
    engine, (train, held) = TorchEngine(rundir), text()
    for name, weight in start.items():
        engine._parameters[name].data.copy_(weight)
    for step in range(steps):
        engine.forward_backward(rows(train, step + 10**6 * bool(start)))
        engine.apply(rate * min(1.0, (step + 1) / 50))
    loss = sum(engine.evaluate(rows(held, -1 - number)).mean for number in range(HELD)) / HELD
    weights = {name: each.detach().float() for name, each in engine._parameters.items()}
    engine.close()
    return loss, weights


def main() -> None:
    """Prints a line for each regime and rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=800, help="steps in fp32 before")
    parser.add_argument("--steps", type=int, default=800, help="steps of each regime")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        dist.init_process_group("gloo", init_method=f"file://{out / 'meet'}", rank=0, world_size=1)
        loss, start = run(out, {}, 1e-3, given.first, {})
        print(f"start: {loss:.4f}", flush=True)
        for rate in RATES:
            for name, layout in REGIMES.items():
                loss, _ = run(out, layout, rate, given.steps, start)
                print(f"learning rate {rate:g}, {name}: {loss:.4f}", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
