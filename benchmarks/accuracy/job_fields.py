"""Parses the text fields of a row's ``job``. An unknown word is an error that names the field."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.accuracy.pipelines import NotPredictedError, Row
from kit.cost.memory.states import BLOCK
from kit.specs.job import OptimizerName

PROGRAMS = {
    "torchtitan": r"torchtitan|pytorch/ao\b",
    "huggingface": r"transformers|hugging ?face|fsdp_qlora|accelerate|axolotl|llama-?factory|\btrl\b|peft",
}
"""Program name in a row's source or notes → the program whose layers FSDP shards (torchao measures torchtitan)."""

_KNOWN = {
    "precision": r"bf16|bfloat16|fp16|float16|fp32|float32|tf32|fp8|fp4|\bamp\b|mixed",
    "transformer_impl": r"^(te|transformer.engine|local)",
    "grad_dtype": r"fp32|bf16|fp16",
}
_DISPATCHER = r"alltoall|all-to-all|allgather|flex|deepep|hybridep"


def check_words(row: Row) -> None:
    """Raises ``NotPredictedError`` for an unknown word."""
    stated = [(f"job.{name}", row["job"].get(name), known) for name, known in _KNOWN.items()]
    stated.append(("model.moe.dispatcher", (row["model"].get("moe") or {}).get("dispatcher"), _DISPATCHER))
    for name, value, known in stated:
        if value is not None and not re.search(known, str(value), re.IGNORECASE):
            raise NotPredictedError(f"{name}={value!r:.60} is not understood")


class Optimizer(NamedTuple):
    """The optimizer state of a run."""

    name: OptimizerName
    moments: int
    """Number of moments of a layer's matrix."""
    moment_bytes: float | None
    """Bytes per element of a moment; None: the program's default."""
    short_masters: bool
    """Master weights and gradients in 16 bits: no fp32 copy exists (DeepSpeed's bf16_master_weights_and_grads, trainers
    whose weights are bf16 throughout)."""
    paged: bool
    """Moments in managed memory, which torch's allocator does not count (bitsandbytes, Paged…)."""
    in_backward: bool
    """Whether backward steps each parameter as soon as its gradient is ready, and then frees the gradient."""


def optimizer_of(job: Row) -> Optimizer:
    """The optimizer in ``job.optimizer``; AdamW by default."""
    text = str(job.get("optimizer") or "adamw").lower()
    names: list[tuple[str, OptimizerName, int]] = [
        (r"muon", "muon", 1),
        (r"adafactor", "adafactor", 0),
        (r"adam", "adamw", 2),
        (r"lion|sgd|momentum", "sgd", 1),
    ]
    found = next(((name, moments) for word, name, moments in names if re.search(word, text)), None)
    if found is None:
        raise NotPredictedError(f"job.optimizer={text!r:.60} is not understood")
    widths = [
        (r"8.?bit|int8|fp8 (states|moments)|adamwfp8", 1 + 4 / BLOCK),
        (r"4.?bit", 0.5 + 4 / 128),
        (r"(bf16|16.?bit)(?!.*fp32 (state|moment)).*(states?|moments?)", 2.0),
    ]
    width = next((size for word, size in widths if re.search(word, text)), None)
    return Optimizer(
        name="adamw-8bit" if found[0] == "adamw" and width == 1 + 4 / BLOCK else found[0],
        moments=found[1],
        moment_bytes=width,
        short_masters=bool(re.search(r"bf16_master|(bf16|16.?bit) (master|main)", text)),
        paged="paged" in text or "paged" in str(job.get("offload")).lower(),
        in_backward=bool(re.search(r"in.(the.)?backward", text)),
    )


class Offload(NamedTuple):
    """State that a run offloaded from the device."""

    optimizer: float
    """Share of the optimizer's state."""
    parameters: bool
    activations: bool
    layers: int | None
    """Number of layers whose activations are offloaded; None: all."""
    nvme: bool


def offload_of(job: Row) -> Offload:
    """The offload in ``job.offload``. A device alone means the optimizer state, as in DeepSpeed's
    ``offload_optimizer``; with FSDP it means all sharded state (CPUOffload)."""
    value = job.get("offload")
    text = "" if value in (None, False) else str(value).lower()
    if text in ("", "none", "no", "false"):
        return Offload(0.0, False, False, None, False)
    optimizer = bool(re.search(r"optim|paged", text))
    parameters = bool(re.search(r"param|weight|model", text))
    activations = "activation" in text
    nvme = bool(re.search(r"nvme|disk|ssd", text))
    if not (optimizer or parameters or activations):
        if not re.search(r"cpu|host|ram|true", text) and not nvme:
            raise NotPredictedError(f"job.offload={text!r:.60} is not understood")
        optimizer, parameters = True, job.get("engine") == "fsdp"
    layers = re.search(r"(\d+) layers", text)
    share = re.search(r"fraction[ =:]*([\d.]+)|([\d.]+) ?%", text)
    fraction = 1.0 if share is None else float(share.group(1) or float(share.group(2)) / 100)
    of_layers = int(layers.group(1)) if layers and activations else None
    return Offload(fraction if optimizer else 0.0, parameters, activations, of_layers, nvme)


def program_of(row: Row) -> str:
    """The program whose layers FSDP sharded: from ``job.program``, or else from the source and the notes.

    If none names a program, torchtitan is assumed for compiled layers or recompute per operator, otherwise
    transformers.
    """
    stated = row["job"].get("program") or row["job"].get("trainer")
    texts: list[Any] = [stated] if stated else [row["source"].get("address"), row.get("notes")]
    for text in texts:
        for program, words in PROGRAMS.items():
            if re.search(words, str(text or ""), re.IGNORECASE):
                return program
    by_operator = re.search(r"\bop\b|operator", str(row["job"].get("recompute_detail")))
    return "torchtitan" if by_operator or row["job"].get("compile") else "huggingface"


def date_of(row: Row) -> str:
    """Day or month of the program that ran (2025-04), or of the table that the row is from; far in the future where
    neither is stated, for the program as it is now."""
    stated = row["source"].get("date")
    named = re.search(r"[_-](20\d\d)-?(0[1-9]|1[0-2])[_.-]", str(row["source"].get("address")))
    return str(stated) if stated else "-".join(named.groups()) if named else "9999"
