"""A rehearsal's model and data: random weights, and the bytes of the Python standard library's source files."""

from __future__ import annotations

import inspect
import json
import string
import textwrap
from pathlib import Path

from kit.rehearsal.scaled_down import VOCAB_SIZE
from kit.specs.job import JobSpec
from kit.specs.model import ModelSpec

ROWS = 64
HELD_OUT = 8
SEED = 20


def write_model(model: ModelSpec, directory: Path, frozen: bool = False) -> None:
    """Write a Hugging Face directory with random weights of this shape.

    ``frozen``: the rehearsal does not train these weights, so round them to bf16. Otherwise 4-bit quantisation of fp32
    and bf16 copies could differ, and the two runs would not train the same model."""
    from kit.engines.huggingface.models import random_model

    made = random_model(model, SEED)
    if frozen:
        made = made.bfloat16().float()
    made.save_pretrained(directory)


def write_data(job: JobSpec, prefix: Path) -> None:
    """Write training and validation data for the job's objective, as ``prefix/train`` and ``prefix/validation``."""
    from kit.training.data.indexed import PairFormat
    from kit.training.data.indexed_writer import indexed_writer

    start = 0 if job.objective == "seq2seq" else None
    pair = PairFormat(tokenizer="bytes", vocab_size=VOCAB_SIZE, objective=job.objective, decoder_start_token_id=start)
    text = "".join(inspect.getsource(module) for module in (json, string, textwrap)).encode()
    for name, part in (("train", text[4096:]), ("validation", text[:4096])):
        with indexed_writer(prefix / name, pair) as writer:
            if job.objective == "pretrain":
                writer.add_document(list(part))
                continue
            # Rows of unequal length, so that a wrong token count or mask changes the loss.
            for index in range(HELD_OUT if name == "validation" else ROWS):
                begin = index * 61 % (len(part) - 64)
                row = list(part[begin : begin + 24 + index * 7 % 33])
                cut = 8 + index % 5
                writer.add_row([row[:cut], row[cut:]])
