"""TRL's DPOTrainer on preferences: a plain script, nothing of kit's.

    kit emit recipe.yaml --out run
    accelerate launch --config_file run/accelerate.yaml examples/trl_dpo.py --model DIR --preferences FILE.jsonl …

Rows are {"prompt", "chosen", "rejected"}, each a list of messages. Arguments that the plan decides stand in
run/ds_config.md. The model is its own reference.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import HfArgumentParser
from trl import DPOConfig, DPOTrainer


@dataclass
class Arguments:
    """What is trained on what."""

    model: str = field(metadata={"help": "Hugging Face directory"})
    preferences: str = field(metadata={"help": "jsonl file"})


def main() -> None:
    args, training = HfArgumentParser((Arguments, DPOConfig)).parse_args_into_dataclasses()
    rows = load_dataset("json", data_files=args.preferences, split="train")
    trainer = DPOTrainer(model=args.model, args=training, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    wrapped = trainer.model_wrapped
    stage = int(wrapped.zero_optimization_stage()) if hasattr(wrapped, "zero_optimization_stage") else None
    facts = {"engine": type(wrapped).__name__, "zero_stage": stage, "processes": training.world_size, "losses": losses}
    print(json.dumps({"rank": int(os.environ.get("RANK", "0")), **facts}), flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
