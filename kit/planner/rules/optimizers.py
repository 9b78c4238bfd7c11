"""Rules of optimizers: which engine runs which (kit/specs/optimizers.py), and on which layouts."""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.planner.divisors import one_of
from kit.planner.rules.rule import rule
from kit.specs.optimizers import OPTIMIZERS


@rule(
    says=lambda w: (
        f"optimizer.name={w.job.optimizer.name} on engine={w.layout.engine}, which "
        f"{OPTIMIZERS[w.job.optimizer.name].missing[w.layout.engine]}; use "
        f"engine={one_of(OPTIMIZERS[w.job.optimizer.name].implementations)}, or optimizer.name="
        f"{one_of(name for name, each in OPTIMIZERS.items() if w.layout.engine in each.implementations)}"
    )
)
def optimizer(w: Workload) -> bool:
    """Each engine runs the optimizers of ``OPTIMIZERS`` that name an implementation for it."""
    return w.layout.engine not in OPTIMIZERS[w.job.optimizer.name].implementations


@rule(
    "torch",
    "deepspeed",
    says=lambda w: (
        f"optimizer.name={w.job.optimizer.name} with offload_optimizer={w.layout.offload_optimizer}, where AdamW steps "
        "on the host; use offload_optimizer=none, or optimizer.name=adamw"
    ),
)
def offload_needs_adam(w: Workload) -> bool:
    """engine.py, _configure_optimizer: an offloaded optimizer must be DeepSpeedCPUAdam (zero_force_ds_cpu_optimizer).
    DeepSpeedCPULion compiles too, but allocates a second moment that it never uses."""
    return w.job.optimizer.name != "adamw" and w.layout.offload_optimizer != "none"


@rule(
    "deepspeed",
    says=lambda w: (
        f"optimizer.name=adafactor with zero_stage={w.layout.zero_stage}, tp={w.layout.tp}: ranks have flat parts of "
        "matrices, without rows and columns; use zero_stage=0 and tp=1, or engine=torch"
    ),
)
def adafactor_needs_whole_matrices(w: Workload) -> bool:
    """ZeRO's optimizers step flat partitions: of those torch.optim.Adafactor would keep a whole second moment."""
    return w.job.optimizer.name == "adafactor" and (w.layout.zero_stage > 0 or w.layout.tp > 1)


@rule(
    "deepspeed",
    says=lambda w: (
        f"optimizer.name=lion on {w.cluster.gpu.name} with engine=deepspeed, whose FusedLion is a CUDA kernel; use "
        "engine=torch"
    ),
)
def fused_lion_needs_cuda(w: Workload) -> bool:
    """deepspeed/ops/lion/fused_lion.py: currently GPU-only."""
    return w.job.optimizer.name == "lion" and w.cluster.gpu.device == "cpu"


@rule(
    "megatron",
    says=lambda w: (
        f"optimizer.name=sgd with zero_stage={w.layout.zero_stage}: megatron-core's distributed optimizer steps with "
        "Adam only; use zero_stage=0, or engine=deepspeed or torch"
    ),
)
def distributed_optimizer_needs_adam(w: Workload) -> bool:
    """optimizer/distrib_optimizer.py, __init__: only Adam, due to checkpointing requirements."""
    return w.job.optimizer.name == "sgd" and w.layout.zero_stage > 0


@rule(
    "torch",
    says=lambda w: (
        f"optimizer.name=muon with {w.model.name}, whose experts are one tensor of three dimensions; use "
        "optimizer.name=adamw"
    ),
)
def muon_needs_matrices(w: Workload) -> bool:
    """torch/optim/_muon.py: Muon supports parameters of two dimensions only."""
    return w.job.optimizer.name == "muon" and w.model.num_experts > 0
