"""Rules of the objectives that TRL's trainers run (kit/specs/trl.py)."""

from __future__ import annotations

from kit.cost.workload import Workload
from kit.planner.rules.rule import rule
from kit.specs.job import GrpoSpec
from kit.specs.text import first


@rule(
    message=lambda w: (
        f"objective={w.job.objective} with chunked_loss, tiled_mlp, compile_layers, activation_offloading, "
        "or gradient_compression: these are of kit's own loop, and TRL's "
        f"{w.trl.trainer if w.trl else ''} trains; leave them out"
    )
)
def trl_has_its_own_loop(w: Workload) -> bool:
    """TRL's trainers read none of these choices."""
    layout = w.layout
    fast = layout.chunked_loss or layout.tiled_mlp or layout.compile_layers or layout.activation_offloading
    return w.trl is not None and (fast or layout.gradient_compression != "none")


@rule(
    message=lambda w: (
        f"objective={w.job.objective} with precision={w.job.precision}, optimizer.name={w.job.optimizer.name}: TRL's "
        "trainers are planned with fp32, bf16 or fp16, and adamw"
    )
)
def trl_precision_and_optimizer(w: Workload) -> bool:
    """The Trainer makes its own optimizer where no ds_config.json names one."""
    return w.trl is not None and (w.job.precision == "fp8" or w.job.optimizer.name != "adamw")


@rule(message="objective=kto with micro_batch_size=1: the KL term takes the answer of another row; use 2")
def kto_needs_two_rows(w: Workload) -> bool:
    """kto_trainer.py, calculate_kl."""
    return w.job.objective == "kto" and w.layout.micro_batch_size < 2


@rule()
def grpo(w: Workload) -> str | None:
    """Completions of a prompt stay in one step, and leave room for the prompt."""
    job = w.job
    if job.objective != "grpo":
        return None if job.grpo is None else f"job.grpo with objective={job.objective}; leave it out, or use grpo"
    chosen = job.grpo or GrpoSpec()
    batch, each = job.global_batch_size, chosen.num_generations
    reasons = {
        f"global_batch_size={batch} is not a multiple of grpo.num_generations={each}; use {max(1, batch // each)} · "
        f"{each}": batch % each,
        f"grpo.max_completion_length={chosen.max_completion_length} leaves no room for the prompt in seq_length="
        f"{job.seq_length}; use a smaller one, or a larger seq_length": chosen.max_completion_length >= job.seq_length,
        "grpo.vllm_gpu_memory_utilization on CPU processes; leave it out": (
            chosen.vllm_gpu_memory_utilization is not None and w.cluster.gpu.device == "cpu"
        ),
    }
    return first(reasons)
