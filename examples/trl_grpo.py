"""TRL's GRPOTrainer on prompts: a plain script, nothing of kit's.

    kit emit recipe.yaml --out run && cd run
    accelerate launch --config_file accelerate.yaml own_script.py ../examples/trl_grpo.py --prompts FILE.jsonl …

Rows are {"prompt": [messages]}; other columns reach the reward. Arguments that the plan decides stand in
run/ds_config.md. transformers generates the completions; on GPUs, --use_vllm true --vllm_mode colocate is many times
faster.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from transformers import HfArgumentParser, Trainer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config, get_quantization_config


@dataclass
class Arguments:
    """What is trained on what."""

    model: str = field(metadata={"help": "Hugging Face directory"})
    prompts: str = field(metadata={"help": "jsonl file"})


def readable(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The reward: the share of characters that a keyboard has. Put your own here."""
    texts = [messages[0]["content"] for messages in completions]
    return [sum(each.isascii() and each.isprintable() for each in text) / max(len(text), 1) for text in texts]


def main() -> None:
    args, training, how = HfArgumentParser((Arguments, GRPOConfig, ModelConfig)).parse_args_into_dataclasses()
    training.model_init_kwargs = {"dtype": how.dtype, **(training.model_init_kwargs or {})}
    rows = load_dataset("json", data_files=args.prompts, split="train")
    trainer = GRPOTrainer(
        model=args.model,
        args=training,
        train_dataset=rows,
        reward_funcs=readable,
        peft_config=get_peft_config(how),
        quantization_config=get_quantization_config(how),
    )
    trainer.train()
    report(trainer)
    trainer.accelerator.end_training()


def report(trainer: Trainer) -> None:
    """One line, from one process, that says what really ran: launchers fall back to less in silence."""
    model, steps = trainer.model_wrapped, [entry for entry in trainer.state.log_history if "loss" in entry]
    stage = int(model.zero_optimization_stage()) if hasattr(model, "zero_optimization_stage") else None
    facts = {"engine": type(model).__name__, "zero_stage": stage, "processes": trainer.args.world_size}
    curve = {"losses": [step["loss"] for step in steps], "norms": [step["grad_norm"] for step in steps]}
    if trainer.is_world_process_zero():
        print(json.dumps({**facts, **curve}), flush=True)


if __name__ == "__main__":
    main()
