"""Rules of optimizers: which engine runs which (kit/specs/optimizers.py), and on which layouts."""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.planner.divisors import one_of
from kit.planner.rules.rule import rule
from kit.specs.optimizers import OPTIMIZERS
from kit.specs.text import first


@rule(
    message=lambda w: (
        f"optimizer.name={w.job.optimizer.name} on engine={w.layout.engine}, which "
        f"{OPTIMIZERS[w.job.optimizer.name].missing[w.layout.engine]}; use "
        f"engine={one_of(OPTIMIZERS[w.job.optimizer.name].implementations)}, or optimizer.name="
        f"{one_of(name for name, each in OPTIMIZERS.items() if w.layout.engine in each.implementations)}"
    )
)
def optimizer(w: Workload) -> bool:
    """Each engine runs the optimizers of ``OPTIMIZERS`` that name an implementation for it."""
    return w.layout.engine not in OPTIMIZERS[w.job.optimizer.name].implementations


@rule()
def bf16_state(w: Workload) -> str | None:
    """torch: moments have the dtype of the weights (torch/optim/adam.py, _init_group; torchao/optim/adam.py); nothing
    else was tried, and fp8 and PowerSGD start from fp32. DeepSpeed: config.py, _do_error_check; bf16_optimizer.py has
    fp32 state in any case; files of NVMe swapping were not measured. Megatron: optimizer_config.py, whose
    precision-aware optimizer is Transformer Engine's FusedAdam under the distributed optimizer."""
    layout, job = w.layout, w.job
    if layout.optimizer_state_dtype == "fp32":
        return None
    megatron, summed = layout.engine == "megatron", layout.gradient_accumulation_steps > 1
    torch, zero = layout.engine == "torch", layout.engine == "deepspeed"
    alone = layout.zero_stage == 1 and summed and layout.offload_optimizer == "none" and zero
    taken = ("adamw", "adamw-8bit") if torch else ("adamw",)
    reasons = {
        f"optimizer.name={job.optimizer.name}; use {' or '.join(taken)}": job.optimizer.name not in taken,
        f"precision={job.precision}; use bf16": job.precision != "bf16",
        "autocast=true, whose weights are fp32; use false": layout.autocast,
        "LoRA, whose optimizer is small": job.lora is not None,
        f"gradient_compression={layout.gradient_compression}, of fp32 gradients": torch
        and layout.gradient_compression != "none",
        f"gradient_dtype={layout.gradient_dtype}, which it includes": torch and layout.gradient_dtype != "fp32",
        "zero_stage=0; use 1 or more": layout.zero_stage == 0 and not torch,
        "zero_stage=1 and several micro batches, whose optimizer has fp32 state; use zero_stage=2 or 3": alone,
        "state on NVMe; use none or cpu": layout.uses_nvme,
        "Megatron's layers under DeepSpeed; use huggingface": zero and layout.implementation != "huggingface",
        f"implementation={layout.implementation}; use transformer_engine": megatron
        and layout.implementation != "transformer_engine",
        "the optimizer on the host; use one of them": megatron and layout.offload_optimizer != "none",
    }
    return first(reasons, f"optimizer_state_dtype={layout.optimizer_state_dtype} with {{}}, or leave it out")


@rule(
    "torch",
    message=lambda w: (
        f"optimizer.name=paged-adamw-8bit with zero_stage={w.layout.zero_stage}: bitsandbytes' class does not step "
        "DTensors; use zero_stage=0, or optimizer.name=adamw-8bit"
    ),
)
def paged_needs_whole_matrices(w: Workload) -> bool:
    """bitsandbytes/optim/optimizer.py, get_state_buffer: state of the parameter's own shape, by its address."""
    return w.job.optimizer.name == "paged-adamw-8bit" and w.layout.zero_stage > 0


@rule("torch")
def stochastic_round(w: Workload) -> str | None:
    """kit/engines/torch/stochastic_rounding.py: replicas draw the same numbers if they draw as many."""
    layout = w.layout
    if not layout.bf16_stochastic_round:
        return None
    reasons = {
        "rounds weights of optimizer_state_dtype=bf16; set that too, or leave it out": (
            layout.optimizer_state_dtype != "bf16"
        ),
        f"with tp={layout.tp}, whose ranks hold some weights twice and would round them apart; use tp=1, or "
        "bf16_stochastic_round=false": layout.tp > 1,
    }
    return first(reasons, "bf16_stochastic_round=true {}")


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
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
    message=lambda w: (
        f"optimizer.name=adafactor with zero_stage={w.layout.zero_stage}, tp={w.layout.tp}: ranks have flat parts of "
        "matrices, without rows and columns; use zero_stage=0 and tp=1, or engine=torch"
    ),
)
def adafactor_needs_whole_matrices(w: Workload) -> bool:
    """ZeRO's optimizers step flat partitions: of those torch.optim.Adafactor would keep a whole second moment."""
    return w.job.optimizer.name == "adafactor" and (w.layout.zero_stage > 0 or w.layout.tp > 1)


@rule(
    "deepspeed",
    message=lambda w: (
        f"optimizer.name=lion on {w.cluster.gpu.name} with engine=deepspeed, whose FusedLion is a CUDA kernel; use "
        "engine=torch"
    ),
)
def fused_lion_needs_cuda(w: Workload) -> bool:
    """deepspeed/ops/lion/fused_lion.py: currently GPU-only."""
    return w.job.optimizer.name == "lion" and w.cluster.gpu.device == "cpu"


@rule(
    "megatron",
    message=lambda w: (
        f"optimizer.name={w.job.optimizer.name} with zero_stage={w.layout.zero_stage}: megatron-core's distributed "
        "optimizer steps with Adam only; use zero_stage=0, or engine=torch"
    ),
)
def distributed_optimizer_needs_adam(w: Workload) -> bool:
    """optimizer/distrib_optimizer.py, __init__: only Adam, due to checkpointing requirements."""
    return w.job.optimizer.name in ("sgd", "muon") and w.layout.zero_stage > 0


@rule(
    "megatron",
    message=lambda w: (
        f"optimizer.name=muon with tp={w.layout.tp} and num_key_value_heads={w.model.num_key_value_heads}: ranks have "
        "unequal parts of query, key and value; use a tp that divides the heads, or engine=torch"
    ),
)
def muon_needs_whole_heads(w: Workload) -> bool:
    """optimizer/emerging_optimizers.py, orthogonalize: a rank's rows are whole groups of query, key and value."""
    return w.job.optimizer.name == "muon" and w.model.num_key_value_heads % w.layout.tp > 0


@rule(
    "torch",
    message=lambda w: (
        f"optimizer.name=muon with {w.model.name}, whose experts are one tensor of three dimensions; use "
        "optimizer.name=adamw"
    ),
)
def muon_needs_matrices(w: Workload) -> bool:
    """torch/optim/_muon.py: Muon supports parameters of two dimensions only."""
    return w.job.optimizer.name == "muon" and w.model.num_experts > 0
