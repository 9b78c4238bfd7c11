"""A plain Hugging Face Trainer script, as in transformers' examples: nothing of kit's.

    kit emit recipe.yaml --out run && cd run
    accelerate launch --config_file accelerate.yaml own_script.py ../examples/trainer.py --model DIR --text FILE …
    deepspeed --no_local_rank own_script.py ../examples/trainer.py --deepspeed ds_config.trainer.json …

The arguments that the plan decides (batch, accumulation, rate, clipping, precision) stand in run/README.md.
"""

from __future__ import annotations

import json
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
    report(trainer)
    trainer.accelerator.end_training()


def blocks_of(args: Arguments) -> list[dict[str, torch.Tensor]]:
    """The text as sequences of equal length."""
    with open(args.text, encoding="utf-8") as file:
        tokens = AutoTokenizer.from_pretrained(args.model)(file.read())["input_ids"]
    whole = len(tokens) // args.block
    blocks = torch.tensor(tokens[: whole * args.block]).reshape(whole, args.block)
    return [{"input_ids": block, "labels": block} for block in blocks]


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
