"""Requests of one dense model on a node of H100, and layouts and candidates that tests of the planner share."""

from __future__ import annotations

from typing import Any

from kit.planner.make_plan import make_plan
from kit.planner.plan import Plan
from kit.planner.request import Request
from kit.planner.search import Candidate
from kit.specs.catalog import load_model
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec, LoraSpec
from kit.specs.layout import Layout, Pins
from tests.planning.shapes import DENSE, NODE
from tests.support.models import cluster, deepspeed, job, megatron, torch

LORA = LoraSpec(rank=7)
ONE = cluster("1xH100")


def request(pins: Pins | None = None, model: Any = DENSE, machines: Any = NODE, **changes: Any) -> Request:
    """16 sequences of 1,024 tokens."""
    the_job = job(**{"seq_length": 1024, "global_batch_size": 16, **changes})
    return Request(model=model, cluster=machines, job=the_job, pins=pins or Pins())


def planned(name: str, machines: str | ClusterSpec, pins: Pins | None = None, **the_job: Any) -> Plan:
    """The plan of a model of the catalog, for the job of a recipe that says nothing else."""
    spec = cluster(machines) if isinstance(machines, str) else machines
    return make_plan(load_model(name), spec, JobSpec(**the_job), pins)


TORCH, ZERO = Pins(engine="torch"), Pins(engine="deepspeed")
WHOLE = torch()


def candidate(seconds: float | None, gib: float = 9.0, layout: Layout = WHOLE, **more: Any) -> Candidate:
    """A layout with its memory and step."""
    return Candidate(layout.but(**more), gib, seconds)


Z2, Z3, M = deepspeed(zero_stage=2, dp=8), deepspeed(zero_stage=3, dp=8), megatron(dp=8)
OVER = deepspeed(zero_stage=3, tp=2).but(implementation="local")
SHORT = deepspeed(zero_stage=3, dp=8, offload_optimizer="cpu")
PLAN = make_plan(
    DENSE,
    cluster("32xH100"),
    job(seq_length=1024, global_batch_size=96, total_tokens=10**11),
    Pins(engine="deepspeed", zero_stage=2, micro_batch_size=1),
)
