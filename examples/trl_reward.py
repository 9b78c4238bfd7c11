"""TRL's RewardTrainer on preferences: a plain script, nothing of kit's.

    kit emit recipe.yaml --out run && cd run
    accelerate launch --config_file accelerate.yaml own_script.py ../examples/trl_reward.py --preferences FILE.jsonl …

Rows are {"chosen", "rejected"}, each a list of messages. Arguments that the plan decides stand in run/README.md. The
model's output head is replaced by a score.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import HfArgumentParser, Trainer
from trl import ModelConfig, RewardConfig, RewardTrainer, get_peft_config, get_quantization_config


@dataclass
class Arguments:
    """What is trained on what."""

    model: str = field(metadata={"help": "Hugging Face directory"})
    preferences: str = field(metadata={"help": "jsonl file"})


def main() -> None:
    args, training, how = HfArgumentParser((Arguments, RewardConfig, ModelConfig)).parse_args_into_dataclasses()
    training.model_init_kwargs = {"dtype": how.dtype, **(training.model_init_kwargs or {})}
    rows = load_dataset("json", data_files=args.preferences, split="train")
    trainer = RewardTrainer(
        model=args.model,
        args=training,
        train_dataset=rows,
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
