"""Whether experts stay balanced: a tiny Mixtral and a tiny DeepSeek-V3, trained on text with and without balancing.

Both start from random weights and read the bytes of the standard library's own sources, in one process. Each trains
without balancing and with what its family was published with (kit/specs/families.py), from five seeds. DeepSeek-V3's
published rate moves a bias by at most 0.2 in 200 steps, so it also trains with ten times the rate. ``--write`` keeps
the table in docs/experts.md.
"""

from __future__ import annotations

import dataclasses
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kit.engines.protocol import MicroBatch
from kit.engines.torch.engine import TorchEngine
from kit.specs.balancing import BalancingSpec
from kit.specs.job import OptimizerSpec
from kit.specs.model import Family, ModelSpec
from tests.support import program, tiny
from tests.support.alone import process_group_of_one
from tests.support.page import Section, table

STEPS, WARMUP = 200, 20
ROWS, LENGTH = 8, 128
RATE = 3e-3
LAST = 50
"""Steps at the end whose mean is in the table."""
BOUND = 1.5
"""Largest load over the mean that counts as balanced."""
_EVERYWHERE = {
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": LENGTH,
}
SHAPES: dict[Family, dict[str, Any]] = {
    "mixtral": {"num_layers": 1, "num_experts": 8, "moe_ffn_hidden_size": 128},
    "deepseek_v3": {
        "num_layers": 2,
        "num_experts": 8,
        "experts_per_token": 2,
        "moe_ffn_hidden_size": 32,
        "num_shared_experts": 1,
        "first_dense_layers": 1,
        "router_groups": 2,
        "router_top_groups": 1,
        "routed_scaling_factor": 2.5,
        "head_dim": 10,
    },
}
NONE, PUBLISHED, FASTER = "none", "as published", "its rate times 10"
ARMS: dict[Family, tuple[str, ...]] = {"mixtral": (NONE, PUBLISHED), "deepseek_v3": (NONE, PUBLISHED, FASTER)}
"""Family → kinds of balancing; the last must balance."""
COLUMNS = {"load_at_end": 2, "expert_load_max": 2, "expert_load_entropy": 3, "dead_experts": 1, "loss": 3}
"""Figure → digits; ``expert_load_max`` is that of the worst layer."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run."""

    family: Family
    arm: str
    steps: list[dict[str, float]]
    """Of each step: the engine's metrics of routing, and the loss."""
    tokens: list[torch.Tensor]
    """(layers, experts) of each step."""

    def at_end(self, name: str) -> float:
        """Mean over the last steps. ``load_at_end``: fullest expert over the mean, of all their tokens together, so
        that no step's few texts decide."""
        if name != "load_at_end":
            return statistics.fmean(step[name] for step in self.steps[-LAST:])
        tokens = torch.stack(self.tokens[-LAST:]).sum(0).double()
        return float((tokens.max(1).values / tokens.mean(1)).max())


def _text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def _batches(text: torch.Tensor, seed: int) -> Iterator[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=generator).tolist()
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        yield MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def run(spec: ModelSpec, arm: str, seed: int, text: torch.Tensor, steps: int) -> Curve:
    """Train one model from random weights."""
    job: dict[str, Any] = {"optimizer": OptimizerSpec(), "seq_length": LENGTH, "learning_rate": RATE}
    if arm != NONE:
        chosen = dict(spec.traits.balancing)
        if arm == FASTER:
            chosen["moe_router_bias_update_rate"] *= 10
        job["balancing"] = BalancingSpec(**chosen)
    plan = tiny.plan(spec, job=job, micro_batch_size=ROWS)
    curve, routed = Curve(spec.family, arm, [], []), list[torch.Tensor]()
    with tempfile.TemporaryDirectory() as directory, process_group_of_one():
        engine = TorchEngine(tiny.run_directory(Path(directory) / "run", plan, seed=seed))  # type: ignore[arg-type]
        for name, module in engine.modules().items():
            if name.endswith(".gate"):
                module.register_forward_hook(lambda _, __, output: routed.append(output[2].flatten()))
        for step, batch in zip(range(steps), _batches(text, seed), strict=False):
            loss = engine.forward_backward([batch]).mean
            curve.tokens.append(torch.stack([each.bincount(minlength=spec.num_experts) for each in routed]))
            routed.clear()
            curve.steps.append({**engine.routing_metrics(), "loss": loss})  # type: ignore[dict-item]
            engine.apply(RATE * min(1.0, (step + 1) / WARMUP))
        engine.close()
    print(f"{spec.family}, {arm}, seed {seed}: load {curve.at_end('load_at_end'):.2f}", flush=True)
    return curve


def main(seeds: int = 5, steps: int = STEPS, write: bool = False) -> int:
    """Print the table; 1 where a balanced run is not."""
    torch.set_num_threads(1)
    text, curves = _text(), []
    for family, shape in SHAPES.items():
        spec = tiny.model(family, **{**_EVERYWHERE, **shape})
        for arm in ARMS[family]:
            curves += [run(spec, arm, seed, text, steps) for seed in range(seeds)]
    print(_table(curves))
    if write:
        Section("docs/experts.md", "balancing", lambda: _table(curves)).write()
    return int(any(each.arm == ARMS[each.family][-1] and each.at_end("load_at_end") > BOUND for each in curves))


def _table(curves: Sequence[Curve]) -> str:
    def cell(ends: list[float], digits: int) -> str:
        return f"{statistics.fmean(ends):.{digits}f} ({min(ends):.{digits}f} to {max(ends):.{digits}f})"

    rows = []
    for family, arm in dict.fromkeys((curve.family, curve.arm) for curve in curves):
        group = [curve for curve in curves if (curve.family, curve.arm) == (family, arm)]
        cells = (cell([curve.at_end(name) for curve in group], digits) for name, digits in COLUMNS.items())
        rows.append([family, arm, *cells])
    heads = ["model", "balancing", "fullest expert over the mean", "of one step", "entropy, 1 is even", "dead", "loss"]
    return table(heads, rows)


if __name__ == "__main__":
    program.run(main)
