"""The exported models, judged by plain transformers: held-out loss and greedy generation."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

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

    from kit.training.data.indexed import IndexedTokens
    from kit.training.data.samples import GptSamples

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_directory, local_files_only=True)
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    prompts = [tokenizer(prompt, return_tensors="pt", return_token_type_ids=False) for prompt in PROMPTS]
    generated = tuple(tuple(model.generate(**prompt, **how)[0].tolist()) for prompt in prompts)
    samples = GptSamples(IndexedTokens(validation), seq_length, model.config.vocab_size)
    (batch,) = samples.micro_batches([[*range(min(EVALUATED_SEQUENCES, len(samples)))]])
    with torch.no_grad():
        logits = (model(input_ids=row[None]).logits[0].double() for row in batch.input_ids)
        losses = map(torch.nn.functional.cross_entropy, logits, batch.labels)
        return Verdict(statistics.fmean(map(float, losses)), generated, tokenizer.decode(generated[0]))
