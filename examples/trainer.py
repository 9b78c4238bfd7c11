"""A plain Hugging Face Trainer script, as in transformers' examples: nothing of kit's.

    kit emit recipe.yaml --out run
    accelerate launch --config_file run/accelerate.yaml examples/trainer.py --model DIR --text FILE … --output_dir out
    deepspeed examples/trainer.py --deepspeed run/ds_config.trainer.json --model DIR --text FILE … --output_dir out

The arguments that the plan decides (batch, accumulation, rate, clipping, precision) stand in run/ds_config.md.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Arguments:
    """What is trained on what."""

    model: str = field(metadata={"help": "Hugging Face directory"})
    text: str = field(metadata={"help": "text file"})
    block: int = field(default=128, metadata={"help": "tokens of a sequence"})


def main() -> None:
    args, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    trainer = Trainer(model=model, args=training, train_dataset=blocks_of(args))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    wrapped = trainer.model_wrapped
    stage = int(wrapped.zero_optimization_stage()) if hasattr(wrapped, "zero_optimization_stage") else None
    facts = {"engine": type(wrapped).__name__, "zero_stage": stage, "processes": training.world_size, "losses": losses}
    print(json.dumps({"rank": int(os.environ.get("RANK", "0")), **facts}), flush=True)
    trainer.accelerator.end_training()


def blocks_of(args: Arguments) -> list[dict[str, torch.Tensor]]:
    """The text as sequences of equal length."""
    with open(args.text, encoding="utf-8") as file:
        tokens = AutoTokenizer.from_pretrained(args.model)(file.read())["input_ids"]
    whole = len(tokens) // args.block
    blocks = torch.tensor(tokens[: whole * args.block]).reshape(whole, args.block)
    return [{"input_ids": block, "labels": block} for block in blocks]


if __name__ == "__main__":
    main()
