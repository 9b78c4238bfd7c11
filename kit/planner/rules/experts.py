"""Rules of expert parallelism: ranks that share out the experts of a layer."""

from __future__ import annotations

from math import gcd

from kit.cost.workload import Workload
from kit.planner.divisors import divisors, one_of
from kit.planner.rules.rule import rule
from kit.specs.job import TRL
from kit.specs.text import first


@rule(
    "torch",
    "megatron",
    message=lambda w: f"ep={w.layout.ep}, etp={w.layout.etp} with {w.model.name}, which has no experts; leave them out",
)
def experts_exist(w: Workload) -> bool:
    """Expert parallelism is for models with experts."""
    return w.layout.ep * w.layout.etp > 1 and not w.model.num_experts


@rule(
    "torch",
    "megatron",
    message=lambda w: (
        f"ep={w.layout.ep} does not divide num_experts={w.model.num_experts} of {w.model.name}; "
        f"use {one_of(divisors(gcd(w.model.num_experts, w.cluster.num_gpus)))}"
    ),
)
def ep_divides_experts(w: Workload) -> bool:
    """megatron-core's moe_layer.py, transformers' MoEParamShard: every rank has the same number of experts."""
    return w.model.num_experts % w.layout.ep != 0


def _stage_ranks(w: Workload) -> int:
    return w.layout.dp * w.layout.cp * w.layout.tp


@rule(
    "torch",
    "megatron",
    message=lambda w: (
        f"ep·etp={w.layout.ep}·{w.layout.etp} does not divide the dp·cp·tp={_stage_ranks(w)} ranks of a pipeline "
        f"stage; use sizes whose product is {one_of(divisors(_stage_ranks(w)))}"
    ),
)
def ep_divides_ranks(w: Workload) -> bool:
    """Expert parallelism divides the ranks of a pipeline stage; a Hugging Face model has one."""
    return w.model.num_experts > 0 and _stage_ranks(w) % (w.layout.ep * w.layout.etp) != 0


@rule("torch")
def torch_expert_parallel(w: Workload) -> str | None:
    """kit/engines/torch/expert_parallel.py: transformers' plans beside FSDP2, where gradients were compared."""
    job, layout = w.job, w.layout
    if layout.ep == 1:
        return None
    reasons = {
        f"zero_stage={layout.zero_stage}: experts are spread beside FSDP2; use zero_stage=2 or 3": layout.zero_stage
        < 2,
        f"tp={layout.tp}; use tp=1, or engine=megatron": layout.tp > 1,
        f"{w.model.name}, which no family describes; use ep=1": w.model.approximate is not None,
        "job.lora, whose experts are frozen; use ep=1": job.lora is not None,
        "experts on the host; use offload_param=none, offload_optimizer=none": layout.offload_param != "none",
        f"optimizer.name={job.optimizer.name}; use adamw": job.optimizer.name != "adamw",
        f"precision={job.precision}; use bf16": job.precision == "fp8",
        f"objective={job.objective}, which TRL trains; use ep=1": job.objective in TRL,
    }
    return first(reasons, f"ep={layout.ep} on engine=torch with {{}}")
