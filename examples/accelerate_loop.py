"""A plain Accelerator script: nothing of kit's, and nothing that names DeepSpeed or FSDP.

    kit emit recipe.yaml --out run && cd run
    accelerate launch --config_file accelerate.yaml own_script.py ../examples/accelerate_loop.py --model DIR --text FILE

What it becomes (DDP, FSDP2, ZeRO 1 to 3, with or without offload) is decided by the YAML alone. Batch size and
accumulation are read back from the launcher's configuration where that has them.
"""

from __future__ import annotations

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue the pretraining of a causal LM on a text file.")
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--text", required=True, help="text file")
    parser.add_argument("--block", type=int, default=128, help="tokens of a sequence")
    parser.add_argument(
        "--batch", "--per_device_train_batch_size", type=int, default=2, help="sequences of a process and forward pass"
    )
    parser.add_argument("--accumulation", "--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", "--learning_rate", type=float, default=1e-4)
    parser.add_argument("--eps", type=float, default=1e-8, help="Adam's epsilon")
    parser.add_argument("--out", help="save the trained model here")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = optimizer_of(accelerator, model, args)
    blocks = torch.utils.data.DataLoader(blocks_of(args), batch_size=args.batch, drop_last=True)
    model, optimizer, blocks = accelerator.prepare(model, optimizer, blocks)
    if len(blocks) == 0:
        raise SystemExit(f"error: {args.text} has no batch of {args.batch} x {args.block} tokens for each process")

    losses: list[float] = []
    norms: list[float] = []
    summed, batches = torch.zeros((), device=accelerator.device), 0
    while len(losses) < args.steps:
        for batch in blocks:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(as_number(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
            summed, batches = summed + loss.detach(), batches + 1
            if accelerator.sync_gradients:
                losses.append(float(accelerator.reduce(summed / batches, "mean")))
                summed, batches = torch.zeros_like(summed), 0
            if len(losses) == args.steps:
                break
    report(accelerator, model, losses, norms)
    if args.out:
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(args.out, state_dict=state)
    accelerator.end_training()


def optimizer_of(accelerator: Accelerator, model: torch.nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """The optimizer that ds_config.json names, where there is one."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and "optimizer" in plugin.deepspeed_config:
        return DummyOptim(model.parameters(), lr=args.lr)
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), eps=args.eps, weight_decay=0.1)


def blocks_of(args: argparse.Namespace) -> list[torch.Tensor]:
    """The text as sequences of equal length."""
    with open(args.text, encoding="utf-8") as file:
        tokens = AutoTokenizer.from_pretrained(args.model)(file.read())["input_ids"]
    whole = len(tokens) // args.block
    return list(torch.tensor(tokens[: whole * args.block]).reshape(whole, args.block))


def as_number(norm: torch.Tensor | float) -> float:
    """FSDP2 gives a norm as a tensor that is spread over the ranks."""
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def report(accelerator: Accelerator, model: torch.nn.Module, losses: list[float], norms: list[float]) -> None:
    """One line, from one process, that says what really ran: launchers fall back to less in silence."""
    stage = int(model.zero_optimization_stage()) if hasattr(model, "zero_optimization_stage") else None
    facts = {"engine": type(model).__name__, "zero_stage": stage, "processes": accelerator.num_processes}
    if accelerator.is_main_process:
        print(json.dumps({**facts, "losses": losses, "norms": norms}), flush=True)


if __name__ == "__main__":
    main()
