"""The exported models, judged by plain transformers: held-out loss and greedy generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = ("def main(", "import os\nimport ", "class Error(Exception):\n")
NEW_TOKENS = 24
EVALUATED_SEQUENCES = 64


@dataclass(frozen=True)
class Verdict:
    """What transformers computes with an exported model."""

    held_out_loss: float
    """Nats per token on the first sequences of the held-out data."""
    generated: tuple[tuple[int, ...], ...]
    """Greedy continuation of each prompt, token ids."""
    text: str
    """The first of them, decoded."""


def judge(model_directory: Path, validation: Path, seq_length: int) -> Verdict:
    """Load with ``AutoModelForCausalLM``, evaluate in fp32, generate greedily. Touches no network."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_directory, local_files_only=True)
    generated = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        generated.append(tuple(output[0].tolist()))
    return Verdict(_held_out_loss(model, validation, seq_length), tuple(generated), tokenizer.decode(generated[0]))


def _held_out_loss(model: Any, validation: Path, seq_length: int) -> float:
    import torch

    from kit.training.data.indexed import IndexedTokens
    from kit.training.data.samples import GptSamples

    samples = GptSamples(IndexedTokens(validation), seq_length, model.config.vocab_size)
    loss_sum, tokens = 0.0, 0
    with torch.no_grad():
        for index in range(min(EVALUATED_SEQUENCES, len(samples))):
            input_ids, labels = (torch.as_tensor(x).long()[None] for x in samples[index])
            logits = model(input_ids=input_ids).logits
            loss_sum += float(torch.nn.functional.cross_entropy(logits[0].double(), labels[0], reduction="sum"))
            tokens += labels.numel()
    return loss_sum / tokens
