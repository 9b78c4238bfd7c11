"""Runs that are killed: every engine and ZeRO stage, on two CPU processes, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import kit
from kit.emit.run_directory import RunDirectory
from kit.rehearsal.assets import write_data
from tests.support import runs
from tests.support.assets import RECIPE

STEPS = 40
SAVE_EVERY = 3
"""Often: about half of a run is saving, so that many kills meet a save."""


@dataclass(frozen=True)
class Case:
    """Words that select a layout, over a model of two tiny layers."""

    name: str
    words: tuple[str, ...]
    asynchronous: bool = False


def _case(name: str, engine: str, *pins: str, asynchronous: bool = False) -> Case:
    return Case(name, (f"layout.engine={engine}", *(f"layout.{pin}" for pin in pins)), asynchronous)


CASES = (
    _case("torch-ddp", "torch", "zero_stage=0"),
    _case("torch-fsdp2", "torch", "zero_stage=3"),
    _case("torch-fsdp2-async", "torch", "zero_stage=3", asynchronous=True),
    *(_case(f"deepspeed-zero{stage}", "deepspeed", f"zero_stage={stage}") for stage in range(4)),
    _case("deepspeed-zero2-async", "deepspeed", "zero_stage=2", asynchronous=True),
    _case("megatron-tp2-sp", "megatron", "tp=2", "sp=true", "pp=1"),
    _case("megatron-zero1", "megatron", "tp=1", "pp=1", "cp=1", "zero_stage=1"),
    _case("megatron-pp2-async", "megatron", "tp=1", "pp=2", "vp=1", asynchronous=True),
)
BY_NAME = {case.name: case for case in CASES}

_MODEL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.head_dim=8",
    "model.vocab_size=256",
    "model.max_position_embeddings=64",
)


def emit(case: Case, out: Path, data: Path | str, steps: int = STEPS, *more: str) -> RunDirectory:
    """A new run directory of the case. Random weights from the seed: the same in every run of the same layout."""
    words = (
        *_MODEL,
        "cluster=2xcpu",
        "job.seq_length=32",
        "job.global_batch_size=4",
        "layout.micro_batch_size=1",
        *case.words,
        "run.model_path=null",
        f"run.data.train={data}/train",
        f"run.data.validation={data}/validation",
        f"run.steps={steps}",
        f"run.checkpoint.every_steps={SAVE_EVERY}",
        "run.checkpoint.keep_last=2",
        f"run.checkpoint.asynchronous={str(case.asynchronous).lower()}",
        "run.logging.every_steps=1",
        "run.logging.gradients_at_steps=[]",
        "run.validation_sequences=4",
        *more,
    )
    return runs.emit(RECIPE, out, words)


def prepare(directory: Path) -> Path:
    """The data, once; returns where."""
    write_data(kit.load_recipe(RECIPE, ()).job, directory)
    return directory
