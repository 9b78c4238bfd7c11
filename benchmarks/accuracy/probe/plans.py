"""A plan of a layout given in full, fitting or not: a probe needs no search; and what the probe says of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kit.addons.probe.run import probe
from kit.cost.estimate import predict
from kit.cost.workload import Workload
from kit.planner.plan import Plan
from kit.planner.rules import violations
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan and the stages to probe."""

    model: str | ModelSpec
    engine: str
    """torch, deepspeed or megatron."""
    seq_length: int = 4096
    precision: str = "bf16"
    stages: tuple[int, ...] = (0,)
    layout: dict[str, Any] = field(default_factory=dict)
    lora: LoraSpec | None = None

    @property
    def name(self) -> str:
        """For people: model, engine, what is not the default."""
        model = self.model if isinstance(self.model, str) else self.model.name
        said = ", ".join(f"{key}={value}" for key, value in self.layout.items())
        lora = "" if self.lora is None else f"LoRA of {self.lora.targets}, rank {self.lora.rank}"
        lora += f", dropout {self.lora.dropout}" if self.lora and self.lora.dropout else ""
        parts = [model, self.engine, lora, said, f"{self.seq_length} tokens"]
        return ", ".join(part for part in parts if part) + ("" if self.precision == "bf16" else f", {self.precision}")

    def plan(self) -> Plan:
        """Raises ValueError with every broken rule."""
        model = load_model(self.model) if isinstance(self.model, str) else self.model
        layout = Layout(
            engine=self.engine,  # type: ignore[arg-type]
            implementation="local" if self.engine == "megatron" else "huggingface",
            **{"gradient_accumulation_steps": 1, **self.layout},
        )
        cluster = parse_cluster(f"{layout.world_size}xH100")
        job = JobSpec(
            objective="seq2seq" if model.is_encoder_decoder else "pretrain",
            seq_length=self.seq_length,
            global_batch_size=layout.global_batch_size,
            precision=self.precision,  # type: ignore[arg-type]
            lora=self.lora,
        )
        broken = violations(Workload(model=model, cluster=cluster, job=job, layout=layout))
        if broken:
            raise ValueError(f"{self.name}: " + "; ".join(str(each) for each in broken))
        return Plan(
            model=model,
            cluster=cluster,
            job=job,
            layout=layout,
            predicted=predict(Workload(model, cluster, job, layout)),
            decisions=(),
        )


def probed(cases: Iterable[Case]) -> Iterator[dict[str, Any]]:
    """What the probe says of each stage of each case, in words that JSON has."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for case in cases:
        plan = case.plan()
        for stage in case.stages:
            yield {"name": case.name, "implementation": plan.layout.implementation, **probe(plan, stage).as_json()}
