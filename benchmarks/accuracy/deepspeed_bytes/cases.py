"""Configurations to measure: stage, offload, accumulation and precision on two processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import kit
from kit.planner.plan import Plan
from kit.specs.catalog import parse_cluster
from kit.specs.job import Precision
from kit.specs.layout import Offload

WORLD_SIZE = 2
SEQ_LENGTH = 4
"""Few: activations are gone where tensors are counted, and in bf16 a CPU takes 70 ms for 32 tokens' gradient of a
matrix's input, 8 ms for 4."""

# Every matrix has a million elements: 1 MiB on each rank in bf16 too, the least that goes to NVMe. There are
# sixteen, so that ranks own whole ones: stages 1 and 2 keep the whole gradient of a matrix that they own in part.
MODEL = kit.ModelSpec(
    name="measured",
    family="llama",
    num_layers=2,
    hidden_size=1024,
    ffn_hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=64,
    vocab_size=1024,
    max_position_embeddings=64,
    rope_theta=10000.0,
)


@dataclass(frozen=True)
class Case:
    """One configuration, planned with everything pinned."""

    precision: Precision
    stage: int
    accumulation: int
    optimizer: Offload = "none"
    param: Offload = "none"
    hpz: int = 1
    autocast: bool = False
    short_state: bool = False

    @property
    def name(self) -> str:
        """For people: ``bf16, ZeRO-3, 2 micro batches, optimizer nvme``."""
        places = (("optimizer", self.optimizer), ("weights", self.param))
        parts = (
            self.precision,
            f"ZeRO-{self.stage}",
            f"{self.accumulation} micro batch" + "es" * (self.accumulation > 1),
            *(f"{what} {place}" for what, place in places if place != "none"),
            f"hpZ {self.hpz}" * (self.hpz > 1),
            "autocast" * self.autocast,
            "bf16 optimizer state" * self.short_state,
        )
        return ", ".join(filter(None, parts))

    @property
    def plan(self) -> Plan:
        """On two CPU processes."""
        cluster = dataclasses.replace(parse_cluster(f"{WORLD_SIZE}xcpu"), host_ram_gib=16.0, nvme_gib=16.0)
        job = kit.JobSpec(
            seq_length=SEQ_LENGTH,
            global_batch_size=WORLD_SIZE * self.accumulation,
            total_tokens=1_000_000,
            precision=self.precision,
        )
        pins = kit.Pins(
            engine="deepspeed",
            implementation="huggingface",
            zero_stage=self.stage,
            offload_optimizer=self.optimizer,
            offload_param=self.param,
            zero_hpz=self.hpz,
            autocast=self.autocast,
            optimizer_state_dtype="bf16" if self.short_state else "fp32",
            recompute="none",
            micro_batch_size=1,
        )
        return kit.plan(MODEL, cluster, job, pins)


_OFFLOADS: tuple[tuple[int, Offload, Offload], ...] = (
    *((stage, "none", "none") for stage in range(4)),
    *((stage, "cpu", "none") for stage in (1, 2, 3)),
    (3, "cpu", "cpu"),
    (3, "nvme", "none"),
    (3, "nvme", "nvme"),
)
CASES = (
    *(
        Case(precision, stage, accumulation, optimizer, param)
        for precision in ("bf16", "fp32")
        for stage, optimizer, param in _OFFLOADS
        for accumulation in (1, 2)
    ),
    Case("bf16", 3, 2, hpz=2),
    Case("fp32", 3, 1, hpz=2),
    Case("bf16", 1, 2, autocast=True),
    Case("bf16", 2, 2, autocast=True),
    Case("bf16", 3, 2, autocast=True),
    Case("bf16", 1, 1, short_state=True),
    *(Case("bf16", stage, accumulation, short_state=True) for stage in (2, 3) for accumulation in (1, 2)),
    *(Case("bf16", stage, 2, optimizer="cpu", short_state=True) for stage in (1, 2, 3)),
)
