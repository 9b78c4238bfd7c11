"""Cases that are planned, run and compared with their plan on one GPU; on a CPU with a tiny model."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kit
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import LoraSpec, OptimizerSpec, Precision
from kit.units import GIB
from tests.support.assets import RECIPE

CPU_SHRINK = 32
"""Factor by which sequences are shorter on a CPU."""
LARGE_VOCABULARY = 262_144
"""Rows of Gemma 3's table, the largest in the catalog's families."""


class Skipped(Exception):
    """A needed package is not installed; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan for one GPU."""

    name: str
    model: str = "llama-3.2-1b"
    """Catalog name."""
    vocab_size: int | None = None
    """Replaces the model's own."""
    seq_length: int = 4096
    global_batch_size: int = 8
    precision: Precision | None = None
    """null: bf16 on a GPU, fp32 on a CPU."""
    lora: LoraSpec | None = None
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    pins: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``kit.Pins``."""
    limit_s: float = 120.0
    """Time limit on a GPU; a case that takes longer is reported as such."""


def _case(name: str, engine: str, *, model: str = "llama-3.2-1b", **rest: Any) -> Case:
    fields = {key: rest.pop(key) for key in tuple(rest) if key in Case.__dataclass_fields__}
    return Case(name=name, model=model, pins={"engine": engine, **rest}, **fields)


MICRO_BATCH = 4
"""Micro batch of the recipe: by prediction the fastest that fits 80 GB without recompute."""
FAST: dict[str, Any] = {"chunked_loss": True, "compile_layers": True}
RECIPES = (
    _case("1B, torch", "torch", micro_batch_size=MICRO_BATCH, **FAST),
    _case("1B, deepspeed", "deepspeed", micro_batch_size=MICRO_BATCH, zero_stage=1, **FAST),
    _case("1B, megatron", "megatron", micro_batch_size=MICRO_BATCH),
)
"""The recipe whose MFU is measured on each engine with its fast path. On a GPU the planner chooses torch's fast path;
on a CPU it would not, so the dry run pins it."""
PLAIN = _case("1B, eager mode", "torch", chunked_loss=False, compile_layers=False)
PLAIN_DEEPSPEED = dataclasses.replace(PLAIN, pins=PLAIN.pins | {"engine": "deepspeed", "zero_stage": 1})
SWAPPED: dict[str, Any] = {"hidden_size": 256, "ffn_hidden_size": 1024, "head_dim": 64}
"""Larger sizes for NVMe offload on a CPU, because DeepSpeed does not swap tensors below 1 MiB, and the tiny model's
matrices are all smaller."""

_8B: dict[str, Any] = {"model": "llama-3.1-8b", "global_batch_size": 4}
CASES = (
    *RECIPES,
    _case("1B, torch, cuDNN attention", "torch", micro_batch_size=MICRO_BATCH, attention_kernel="cudnn"),
    _case("1B, torch, fp8", "torch", micro_batch_size=MICRO_BATCH, precision="fp8", **FAST),
    PLAIN,
    _case("1B, chunked loss alone", "torch", chunked_loss=True, compile_layers=False),
    _case("1B, full recompute", "torch", recompute="full"),
    _case("1B, selective recompute", "megatron", recompute="selective"),
    _case("1B, 16k tokens", "torch", seq_length=16384, global_batch_size=2),
    _case("1B, 32k tokens, full recompute", "torch", seq_length=32768, global_batch_size=1, recompute="full"),
    _case("1B, vocabulary of 262k", "torch", vocab_size=LARGE_VOCABULARY, chunked_loss=False),
    _case("1B, vocabulary of 262k, chunked loss", "torch", vocab_size=LARGE_VOCABULARY, chunked_loss=True),
    _case("3B, torch", "torch", model="llama-3.2-3b"),
    _case("3B, deepspeed, full recompute", "deepspeed", model="llama-3.2-3b", zero_stage=1, recompute="full"),
    _case("8B, 8-bit Adam", "torch", **_8B, optimizer=OptimizerSpec(name="adamw-8bit")),
    _case(
        "8B, 8-bit Adam, for 80 GB", "torch", **_8B, optimizer=OptimizerSpec(name="adamw-8bit"), zero_stage=3,
        gradient_dtype="bf16",
    ),
    _case("8B, LoRA", "torch", **_8B, lora=LoraSpec(), micro_batch_size=2, limit_s=180),
    _case("8B, QLoRA", "torch", **_8B, lora=LoraSpec(four_bit=True), limit_s=180),
    _case("8B, ZeRO-Offload", "deepspeed", **_8B, zero_stage=2, offload_optimizer="cpu", limit_s=240),
    _case("1B, ZeRO-Infinity on disk", "deepspeed", zero_stage=3, offload_optimizer="nvme", limit_s=180),
    _case(
        "8B, ZeRO-Infinity on disk", "deepspeed", **_8B, zero_stage=3, offload_optimizer="nvme", offload_param="nvme",
        limit_s=400,
    ),
)  # fmt: skip
"""Cases in order of importance; those for which no time is left are skipped."""
BY_NAME = {case.name: case for case in CASES}


def planned(case: Case, device: str, scratch: Path) -> kit.Plan:
    """The plan of a case. Raises KitError if nothing fits, or if no engine supports the case."""
    model = kit.load_recipe(RECIPE).model if device == "cpu" else load_model(case.model)
    if device == "cpu" and "nvme" in case.pins.values():
        model = dataclasses.replace(model, name=f"{model.name}-wide", **SWAPPED)
    if case.vocab_size is not None:
        vocab_size = case.vocab_size if device == "cuda" else 8 * model.vocab_size
        model = dataclasses.replace(model, name=f"{model.name}-vocab{vocab_size}", vocab_size=vocab_size)
    job = kit.JobSpec(
        seq_length=case.seq_length if device == "cuda" else case.seq_length // CPU_SHRINK,
        global_batch_size=case.global_batch_size,
        precision=case.precision or ("bf16" if device == "cuda" else "fp32"),
        optimizer=case.optimizer,
        lora=case.lora,
    )
    return kit.plan(model, machine(device, scratch), job, kit.Pins(**case.pins))


def peers_plan(device: str, scratch: Path, case: Case = PLAIN) -> kit.Plan:
    """The plan that peers run: eager mode, all logits at once, the largest micro batch that is predicted to fit. Raises
    KitError if none fits."""
    for size in (4, 2):
        try:
            return planned(dataclasses.replace(case, pins=case.pins | {"micro_batch_size": size}), device, scratch)
        except kit.KitError:
            continue
    return planned(case, device, scratch)


def machine(device: str, scratch: Path) -> kit.ClusterSpec:
    """A cluster of one GPU of this machine, with its host memory and the free space on the disk of ``scratch``."""
    cluster = parse_cluster("local" if device == "cuda" else "1xcpu")
    free = shutil.disk_usage(scratch).free / GIB
    ram = cluster.host_ram_gib or parse_cluster("local").host_ram_gib
    # Only the first of several GPUs is measured, so links do not matter.
    return dataclasses.replace(cluster, gpus_per_node=1, nvme_gib=free, host_ram_gib=ram)
