"""What is usual for an objective and a method: the values of a job that nobody has given, one row each with its source.

The table of docs/planning.md is made of these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.specs.job import Objective
    from kit.specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class JobDefaults:
    """Values for one objective and method."""

    seq_length: int
    global_batch_size: int
    """Rows of an optimizer step, where fewer GPUs than that share them."""
    learning_rate: float
    warmup_steps: float
    """As ``run.schedule.warmup_steps``: below 1, a share of the run."""
    epochs: int
    """Length of a run whose data is known and whose length is not."""
    source: str


_ADAPTERS = JobDefaults(
    seq_length=2048,
    global_batch_size=16,
    learning_rate=2e-4,
    warmup_steps=0.03,
    epochs=3,
    source="QLoRA (arXiv 2305.14314, appendix B.2); length and epochs of LLaMA-Factory's llama3_lora_sft.yaml",
)
_FULL: Mapping[str, JobDefaults] = {
    "pretrain": JobDefaults(
        seq_length=4096,
        global_batch_size=512,
        learning_rate=3e-4,
        warmup_steps=2000,
        epochs=1,
        source="Llama 2 (arXiv 2307.09288, section 2.2); 2M tokens a step as Pythia (arXiv 2304.01373)",
    ),
    "sft": JobDefaults(
        seq_length=4096,
        global_batch_size=128,
        learning_rate=2e-5,
        warmup_steps=0.03,
        epochs=3,
        source="Tülu 3 (arXiv 2411.15124, its SFT settings); rate of TRL (trl/scripts/sft.py); epochs of "
        "LLaMA-Factory's llama3_full_sft.yaml",
    ),
    "seq2seq": JobDefaults(
        seq_length=512,
        global_batch_size=128,
        learning_rate=1e-4,
        warmup_steps=0.0,
        epochs=3,
        source="T5 (arXiv 1910.10683, section 3.1); rate for AdamW of transformers' page on T5",
    ),
    **dict.fromkeys(
        ("dpo", "kto"),
        JobDefaults(
            seq_length=1024,
            global_batch_size=64,
            learning_rate=5e-7,
            warmup_steps=0.1,
            epochs=1,
            source="DPO (arXiv 2305.18290, appendix B); length of TRL's DPOConfig, rate of trl/scripts/dpo.py and "
            "kto.py",
        ),
    ),
    "reward": JobDefaults(
        seq_length=2048,
        global_batch_size=64,
        learning_rate=9e-6,
        warmup_steps=0.0,
        epochs=1,
        source="InstructGPT's reward model (arXiv 2203.02155, appendix C.2)",
    ),
    "grpo": JobDefaults(
        seq_length=1024,
        global_batch_size=64,
        learning_rate=1e-6,
        warmup_steps=0.0,
        epochs=1,
        source="TRL's GRPOConfig: 8 completions of 512 tokens for each of 8 prompts",
    ),
}
"""Objective → its row, for all weights."""
_RATE_OF_ADAPTERS = 10.0
"""Learning rate of adapters over that of all weights, as between the commands of trl/scripts/dpo.py and sft.py."""


def defaults_of(objective: Objective, adapters: bool) -> JobDefaults:
    """The row of an objective, for all weights or for LoRA's adapters."""
    row = _FULL[objective]
    if not adapters:
        return row
    if objective in ("pretrain", "sft"):
        return _ADAPTERS
    return JobDefaults(**{**vars(row), "learning_rate": row.learning_rate * _RATE_OF_ADAPTERS})


def with_defaults(given: Mapping[str, Any], model: ModelSpec, num_gpus: int = 1) -> dict[str, Any]:
    """The keys of a job with what is usual where they are silent: at most as long as the model's context, and a row for
    each of ``num_gpus`` GPUs or more. Adapters are for fine-tuning. An unknown objective is left to the parser of the
    job."""
    decoder = "pretrain" if given.get("lora") is None else "sft"
    objective = given.get("objective") or ("seq2seq" if model.is_encoder_decoder else decoder)
    if objective not in _FULL:
        return dict(given)
    row = defaults_of(objective, given.get("lora") is not None)  # type: ignore[arg-type]
    batch = row.global_batch_size
    while batch < num_gpus:
        batch *= 2
    return {
        "objective": objective,
        "seq_length": min(row.seq_length, model.max_position_embeddings),
        "global_batch_size": batch,
        "learning_rate": row.learning_rate,
        **given,
    }
