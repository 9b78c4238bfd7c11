"""Rules of engine=torch: DDP, FSDP2 and tensor parallelism by transformers' plans, fp8 by torchao, 8-bit AdamW."""

from __future__ import annotations

from kit.cost.memory.offload import HOST_SHARE, host_load_gib_per_node
from kit.cost.workload import Workload
from kit.planner.rules.rule import rule
from kit.specs.families import families_where
from kit.specs.job import TRL
from kit.specs.layout import FP8_MULTIPLE
from kit.specs.text import first, listed

# ---------------------------------------------------------------- ways to split


@rule(
    "torch",
    message=(
        "zero_stage=1 on engine=torch, which has DDP (0) and FSDP2 (2 and 3); use one of these, or engine=deepspeed"
    ),
)
def torch_zero(w: Workload) -> bool:
    """kit/engines/torch/engine.py: DDP, or FSDP2, which shards gradients and optimizer state together."""
    return w.layout.zero_stage == 1


@rule(
    "torch",
    message=lambda w: (
        f"tp={w.layout.tp} on engine=torch with family {w.model.family}: tensor parallelism is implemented for "
        f"{listed(families_where('torch_tensor_parallel'))}; use engine=megatron, or tp=1"
    ),
)
def torch_tp_family(w: Workload) -> bool:
    """kit/engines/torch/tensor_parallel.py uses transformers' tensor-parallel plans, which not every family has."""
    return w.layout.tp > 1 and not w.model.traits.torch_tensor_parallel


@rule("torch")
def fsdp2_offload(w: Workload) -> str | None:
    """CPUOffloadPolicy takes weights, gradients and optimizer state to the host together, where torch's AdamW steps."""
    layout, places = w.layout, {w.layout.offload_param, w.layout.offload_optimizer}
    if places == {"none"}:
        return None
    said = f"offload_param={layout.offload_param}, offload_optimizer={layout.offload_optimizer} on engine=torch{{}}"
    reasons = {
        ": FSDP2 offloads both to host memory, or none; use cpu for both, or engine=deepspeed": places != {"cpu"},
        f" with zero_stage={layout.zero_stage}, tp={layout.tp}; use zero_stage=3 and tp=1": (
            layout.zero_stage != 3 or layout.tp > 1
        ),
        f" with ep={layout.ep} was not tested; use ep=1": layout.ep > 1,
    }
    return first(reasons, said)


@rule(
    "torch",
    message=lambda w: (
        f"loading {w.model.name} with lora and tp={w.layout.tp} on engine=torch needs {host_load_gib_per_node(w):.0f} "
        f"GiB of host memory a node, and {HOST_SHARE * (w.cluster.host_ram_gib or 0.0):.0f} of {w.cluster.name} are "
        "usable; use tp=1"
    ),
)
def host_memory_while_loading(w: Workload) -> bool:
    """With adapters and tensor parallelism every rank loads the whole frozen model before it is split."""
    there = w.cluster.host_ram_gib
    loads = w.job.lora is not None and w.layout.tp > 1 and there is not None
    return loads and host_load_gib_per_node(w) > HOST_SHARE * (there or 0.0)


@rule("torch", message=lambda w: f"tp={w.layout.tp} on engine=torch needs FSDP2; use zero_stage=2 or 3")
def torch_tp_needs_fsdp2(w: Workload) -> bool:
    """DTensor's tensor parallelism composes with FSDP2 over the other ranks, but not with DDP."""
    return w.layout.tp > 1 and w.layout.zero_stage == 0


@rule(
    "torch",
    message=lambda w: (
        f"tp={w.layout.tp} does not divide num_key_value_heads={w.model.num_key_value_heads} and ffn_hidden_size="
        f"{w.model.ffn_hidden_size} of {w.model.name}; use a divisor of both"
    ),
)
def torch_tp_divides(w: Workload) -> bool:
    """Each rank has whole key/value heads, and an equal part of the MLP."""
    return w.model.num_key_value_heads % w.layout.tp != 0 or w.model.ffn_hidden_size % w.layout.tp != 0


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


# ---------------------------------------------------------------- fp8: torch._scaled_mm by torchao


@rule(
    "torch",
    message=lambda w: (
        f"precision=fp8 on engine=torch with {w.model.name}: its layers are transformers' Conv1D, and torchao "
        "converts linear layers only; use bf16"
    ),
)
def fp8_linear_layers(w: Workload) -> bool:
    """torchao converts linear layers, and transformers computes GPT-2 by Conv1D."""
    return w.job.precision == "fp8" and w.model.traits.conv1d


@rule("torch")
def fp8_whole_decoders(w: Workload) -> str | None:
    """Adapters, tensor parallelism and two stacks were not tried."""
    for what, there in (
        (w.model.name, w.model.is_encoder_decoder),
        ("job.lora", w.job.lora is not None),
        (f"tp={w.layout.tp}", w.layout.tp > 1),
    ):
        if there and w.job.precision == "fp8":
            return (
                f"precision=fp8 on engine=torch with {what}: it was tested on decoders whose weights are all "
                "trained; use bf16"
            )
    return None


@rule(
    "torch",
    message=lambda w: (
        f"precision=fp8 on engine=torch with hidden_size={w.model.hidden_size} of {w.model.name}, which is not a "
        f"multiple of {FP8_MULTIPLE}: no linear layer could be converted; use bf16"
    ),
)
def fp8_hidden_size(w: Workload) -> bool:
    """torch._scaled_mm: sizes are multiples of 16."""
    return w.job.precision == "fp8" and w.model.hidden_size % FP8_MULTIPLE != 0


@rule(
    "torch",
    message=lambda w: (
        f"precision=fp8 on engine=torch with micro_batch_size·seq_length={w.layout.micro_batch_size * w.job.seq_length}"
        f", which is not a multiple of {FP8_MULTIPLE}: the GEMM that sums over tokens needs it; use seq_length="
        f"{-(-w.job.seq_length // FP8_MULTIPLE) * FP8_MULTIPLE}"
    ),
)
def fp8_tokens(w: Workload) -> bool:
    """The weight gradient's GEMM sums over tokens; rows of unequal length are padded for it, pretraining's are not."""
    tokens = w.layout.micro_batch_size * w.job.seq_length
    return w.job.precision == "fp8" and w.job.objective == "pretrain" and tokens % FP8_MULTIPLE != 0
