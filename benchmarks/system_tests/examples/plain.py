"""What the scripts should compute, by torch alone."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.system_tests.examples.cases import Facts
from benchmarks.system_tests.examples.inputs import BLOCK, EPS, GLOBAL_BATCH, LEARNING_RATE, STEPS


def plain_torch(directory: Path) -> Facts:
    """The text's blocks in order, a step's in one batch; the mean over its tokens."""
    tokens = AutoTokenizer.from_pretrained(directory / "model")((directory / "text.txt").read_text())["input_ids"]
    blocks = torch.tensor(tokens[: len(tokens) // BLOCK * BLOCK]).reshape(-1, BLOCK)
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    adam = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)
    losses, norms = [], []
    for batch in blocks.split(GLOBAL_BATCH)[:STEPS]:
        logits = model(batch).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return Facts("plain torch", None, 1, tuple(losses), tuple(norms))
