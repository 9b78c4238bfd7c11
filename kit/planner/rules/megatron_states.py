"""Rules of what a rank of Megatron-core keeps: gradients, fp8 weights, activations, the optimizer on the host."""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.planner.rules.rule import rule
from kit.specs.text import first, listed


@rule(
    "megatron",
    message="gradient_dtype=bf16 with precision=fp32, whose gradients are in fp32; use bf16, or leave it out",
)
def short_gradients_of_bf16(w: Workload) -> bool:
    """distributed_data_parallel.py: gradients are summed in fp32, or in the dtype of the parameters."""
    return w.layout.gradient_dtype != "fp32" and w.job.precision == "fp32"


@rule("megatron")
def fp8_weights(w: Workload) -> str | None:
    """transformer_config.py, fp8_param, and arguments.py, fp8_param_gather: weights of fp8 GEMMs, which the distributed
    optimizer makes of its fp32 master weights."""
    layout, job = w.layout, w.job
    if not layout.fp8_param_gather:
        return None
    reasons = {
        f"precision={job.precision}; use fp8": job.precision != "fp8",
        f"zero_stage={layout.zero_stage}; use zero_stage=1": layout.zero_stage != 1,
        "LoRA, whose weights nobody gathers": job.lora is not None,
    }
    return first(reasons, "fp8_param_gather=true with {}, or leave it out")


_LOCAL_MODULES = frozenset({"core_attn", "mlp", "moe"})


@rule("megatron")
def recompute_modules(w: Workload) -> str | None:
    """transformer_config.py, recompute_modules. kit's own layers compute norms, latent attention and experts without
    the checkpoints that Transformer Engine's have for them (kit/engines/megatron/model)."""
    layout, named = w.layout, frozenset(w.layout.recompute_modules)
    if not named:
        return None
    absent = {name for name in named & {"moe", "moe_act", "shared_experts"} if not w.model.num_experts}
    absent |= named & {"mla_up_proj"} if w.model.latent is None else set()
    foreign = named - _LOCAL_MODULES if layout.implementation == "local" else frozenset()
    reasons = {
        f"recompute={layout.recompute}; use selective": layout.recompute != "selective",
        f"{listed(sorted(absent))}, which {w.model.name} does not have; take it out": bool(absent),
        f"implementation=local, which recomputes {listed(sorted(_LOCAL_MODULES))} alone": bool(foreign),
    }
    return first(reasons, f"recompute_modules={', '.join(sorted(named))} with {{}}, or leave it out")


@rule("megatron")
def optimizer_on_the_host(w: Workload) -> str | None:
    """optimizer_config.py: optimizer_cpu_offload reuses the precision-aware optimizer, which is a distributed one. In
    fp32, HybridDeviceOptimizer gives what stays on the GPU no gradients (_set_sub_optimizer_grads)."""
    layout, place = w.layout, w.layout.offload_optimizer
    if place == "none" and layout.optimizer_offload_fraction < 1:
        share = f"optimizer_offload_fraction={layout.optimizer_offload_fraction:g}"
        return f"{share} with offload_optimizer=none; use offload_optimizer=cpu, or leave it out"
    if place == "none":
        return None
    reasons = {
        "disks, which it does not use; use cpu": place == "nvme",
        f"zero_stage={layout.zero_stage}; use zero_stage=1": layout.zero_stage != 1,
        f"precision={w.job.precision}; use bf16": w.job.precision != "bf16",
        "LoRA, whose optimizer is small": w.job.lora is not None,
    }
    return first(reasons, f"offload_optimizer={place} on engine=megatron with {{}}, or leave it out")
