"""Rules of objectives that TRL's trainers run."""

from __future__ import annotations

from kit.specs.job import GrpoSpec, OptimizerSpec
from tests.planning.rule_cases import Case
from tests.support.models import deepspeed, torch

CASES = [
    *(
        Case(
            "trl_has_its_own_loop",
            torch(zero_stage=3, **fast),
            "TRL's DPOTrainer trains; leave them out",
            torch(zero_stage=3),
            change={"objective": "dpo"},
        )
        for fast in ({"chunked_loss": True}, {"tiled_mlp": True}, {"activation_offloading": True, "recompute": "full"})
    ),
    Case(
        "trl_precision_and_optimizer",
        torch(zero_stage=3),
        "optimizer.name=sgd: TRL's trainers are planned with fp32, bf16 or fp16, and adamw",
        torch(zero_stage=3),
        change={"objective": "reward", "optimizer": OptimizerSpec(name="sgd")},
        good_change={"optimizer": OptimizerSpec()},
    ),
    Case(
        "kto_needs_two_rows",
        deepspeed(zero_stage=3),
        "the KL term takes the answer of another row; use 2",
        deepspeed(zero_stage=3, micro_batch_size=2),
        change={"objective": "kto"},
    ),
    Case(
        "grpo",
        deepspeed(zero_stage=3),
        "not a multiple of grpo.num_generations=7; use 18 · 7",
        deepspeed(zero_stage=3),
        change={"objective": "grpo", "grpo": GrpoSpec(num_generations=7)},
        good_change={"grpo": None},
    ),
    Case(
        "grpo",
        deepspeed(zero_stage=3),
        "max_completion_length=4096 leaves no room for the prompt in seq_length=4096",
        deepspeed(zero_stage=3),
        change={"objective": "grpo", "grpo": GrpoSpec(max_completion_length=4096)},
        good_change={"grpo": GrpoSpec(max_completion_length=4095)},
    ),
    Case(
        "grpo",
        deepspeed(zero_stage=3),
        "job.grpo with objective=sft; leave it out, or use grpo",
        deepspeed(zero_stage=3),
        change={"objective": "sft", "grpo": GrpoSpec()},
        good_change={"objective": "grpo"},
    ),
    Case(
        "grpo",
        deepspeed(zero_stage=3),
        "vllm_gpu_memory_utilization on CPU processes",
        deepspeed(zero_stage=3),
        gpus="2xcpu",
        change={"objective": "grpo", "precision": "fp32", "grpo": GrpoSpec(vllm_gpu_memory_utilization=0.3)},
        good_change={"grpo": GrpoSpec()},
    ),
]
