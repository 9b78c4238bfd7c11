"""Rows of unequal length on disk, and what a step of them computes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.engines import build_engine
from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.models import random_model
from kit.engines.protocol import IGNORE_INDEX, StateKind
from kit.specs.job import OptimizerSpec
from kit.specs.model import ModelSpec
from kit.specs.run import DataSpec
from kit.training.data.fine_tuning_rows import Rows
from kit.training.data.indexed import IndexedTokens, PairFormat
from kit.training.data.indexed_writer import indexed_writer
from kit.training.data.loader import DataLoader
from kit.training.data.samples import RowSamples
from kit.training.data.shuffle import permuted_index
from tests.support import tiny
from tests.system.parity.faults import planted
from tests.training import runs

JOB: dict[str, Any] = {"objective": "sft", "optimizer": OptimizerSpec(eps=1e-3), "grad_clip": 0.5}


def rows_on_disk(prefix: Path, count: int = 60) -> Path:
    """Chats of one to three turns of random tokens, 4 to 30 in all."""
    generator = np.random.default_rng(3)
    with indexed_writer(prefix, PairFormat(tokenizer="tiny", vocab_size=tiny.VOCAB_SIZE, objective="sft")) as writer:
        for _ in range(count):
            cuts = np.sort(generator.choice(np.arange(1, generator.integers(4, 30)), 3, replace=False))
            writer.add_row([generator.integers(0, tiny.VOCAB_SIZE, size).tolist() for size in np.diff([0, *cuts])])
    return prefix


@dataclass(frozen=True)
class RowsAlone:
    """Eight samples, and what transformers computes of each row for itself."""

    spec: ModelSpec
    data: DataSpec
    model_path: str
    mean: float
    """Over all labels that count."""
    tokens: int
    gradients: dict[str, torch.Tensor]

    def run_directory(self, path: Path, layout: dict[str, Any], **job: Any) -> tiny.TinyRunDirectory:
        """Of a layout that computes the eight samples in one step."""
        chosen = {"micro_batch_size": 2, "gradient_accumulation_steps": 4 // layout.get("dp", 1)} | layout
        plan = tiny.plan(self.spec, job=JOB | job, **chosen)
        return tiny.run_directory(path, plan, model_path=self.model_path, data=self.data)


def rows_alone(path: Path, spec: ModelSpec, packing: bool) -> RowsAlone:
    """The first eight samples of ``rows_on_disk``."""
    rows = Rows(IndexedTokens(rows_on_disk(path / "train")), "sft", tiny.SEQ_LENGTH, tiny.VOCAB_SIZE)
    samples = RowSamples(rows, tiny.SEQ_LENGTH, packing=packing)
    model = random_model(spec, seed=7)
    model.save_pretrained(path / "hf")
    data = DataSpec(train=str(path / "train"), packing=packing)
    drawn = [permuted_index(data.seed, len(samples), k) for k in range(8)]
    numbers = [row for index in drawn for row in (samples.packs[index] if samples.packs else [index])]
    mean, tokens = _unpadded(model, rows.read_all(numbers))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return RowsAlone(spec, data, str(path / "hf"), mean, tokens, gradients)


def gradients_of_a_step(rundir: tiny.TinyRunDirectory, fault: str | None = None) -> dict[str, Any]:
    """The first step of a run, with the data as the loop would feed it. ``fault``: one of tests.system.parity."""
    with planted(fault), closing(build_engine(runs.with_settings(rundir))) as engine:
        batches = DataLoader.open(rundir.plan, rundir.run, engine).step(0)
        loss, evaluated = engine.forward_backward(batches), engine.evaluate(batches)
        gradients = full_tensors(engine, StateKind.GRADIENT)
        engine.discard()
    return {"loss": loss, "evaluated": evaluated, "gradients": gradients}


def _unpadded(model: torch.nn.Module, rows: list[Any]) -> tuple[float, int]:
    """transformers alone, each row for itself: the mean over all labels that count."""
    tokens = sum(int((row.labels != IGNORE_INDEX).sum()) for row in rows)
    logits = [model(torch.from_numpy(row.inputs)[None]).logits[0] for row in rows]
    labels = [torch.from_numpy(row.labels) for row in rows]
    mean = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels), reduction="sum") / tokens
    mean.backward()
    return mean.item(), tokens
