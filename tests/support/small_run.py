"""Small runs in this process, on plain torch, for measuring what is around the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kit.emit.run_directory import RunDirectory
from kit.training.data.indexed import PairFormat
from kit.training.data.indexed_writer import indexed_writer
from tests.support import runs
from tests.support.assets import RECIPE

VOCAB_SIZE = 256


def emit(
    out: Path, *words: str, hidden: int = 64, layers: int = 2, seq_length: int = 256, batch: int = 8
) -> RunDirectory:
    """One process of plain torch on random tokens beside the run directory."""
    data = out.parent / "tokens"
    if not data.with_suffix(".bin").exists():
        write_tokens(data, 400_000)
    return runs.emit(
        RECIPE,
        out,
        (
            f"model.num_layers={layers}",
            f"model.hidden_size={hidden}",
            f"model.ffn_hidden_size={4 * hidden}",
            f"model.head_dim={hidden // 4}",
            f"model.vocab_size={VOCAB_SIZE}",
            f"model.max_position_embeddings={seq_length}",
            f"job.seq_length={seq_length}",
            f"job.global_batch_size={batch}",
            f"layout.micro_batch_size={batch}",
            "run.model_path=null",
            f"run.data.train={data}",
            "run.data.validation=null",
            "run.checkpoint.every_steps=100000",
            "run.logging.every_steps=10",
            "run.logging.gradients_at_steps=[]",
            *words,
        ),
    )


def write_tokens(prefix: Path, count: int, vocab_size: int = VOCAB_SIZE) -> None:
    """One document of random tokens."""
    with indexed_writer(prefix, PairFormat(tokenizer="bytes", vocab_size=vocab_size)) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, vocab_size, count).tolist())
