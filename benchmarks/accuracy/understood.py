"""Words of a row that decide what ran: engine, optimizer, offload, dispatcher, and whose program it was.

A row is described by its fields alone, never by its name. A word that no rule here knows makes the row left out, and
the reason names the field.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from benchmarks.accuracy.pipelines import NotPredictedError, Row

ENGINES = {
    "megatron": "megatron",
    "megatron-core": "megatron",
    "megatron-lm": "megatron",
    "nanotron": "nanotron",
    "deepspeed": "deepspeed",
    "fsdp": "fsdp",
    "fsdp2": "fsdp",
    "torchtitan": "fsdp",
    "ddp": "ddp",
    "torchtune": "ddp",
    "litgpt": "fsdp",
}
"""A row's engine → the one whose collectives are computed. Recipes of torchtune on one device reduce nothing."""
OPTIMIZERS = ("adam", "muon", "8-bit", "8bit", "adafactor", "sgd")
DISPATCHERS = ("alltoall", "allgather", "deepep", "hybridep")


class Offload(NamedTuple):
    """What lives in host memory."""

    optimizer: Literal["none", "cpu", "nvme", "device"]
    """Where its state is; ``device``: on the host, but stepped on the device."""
    parameters: Literal["none", "cpu", "nvme"]


def engine_of(row: Row) -> str:
    """Raises NotPredictedError for an engine that is none of ``ENGINES``."""
    stated = str(row["job"].get("engine") or "").lower()
    if stated not in ENGINES:
        raise NotPredictedError(f"job.engine={row['job'].get('engine')!r} is none of {', '.join(ENGINES)}")
    return ENGINES[stated]


def require_understood(row: Row) -> None:
    """Raises NotPredictedError for an engine, optimizer or dispatcher in unknown words."""
    engine_of(row)
    optimizer = row["job"].get("optimizer")
    if optimizer and not any(word in str(optimizer).lower() for word in OPTIMIZERS):
        raise NotPredictedError(f"job.optimizer={optimizer!r} is none of {', '.join(OPTIMIZERS)}")
    dispatcher = dispatcher_of(row)
    if dispatcher and dispatcher not in DISPATCHERS:
        raise NotPredictedError(f"dispatcher {dispatcher!r} is none of {', '.join(DISPATCHERS)}")


def offload_of(row: Row) -> Offload:
    """Activations on the host cost nothing here: their copies run beside compute. Azure's post names offload of states
    that its GPUs have room for, without saying which rows had it: none is assumed."""
    words = str(row["job"].get("offload") or "none").lower()
    if words in ("none", "false", "no") or "exact flags not per row" in words:
        return Offload("none", "none")
    place = re.search(r"nvme|\bcpu|\bhost\b", words)
    if not place:
        raise NotPredictedError(f"job.offload={row['job']['offload']!r} names neither CPU nor host nor NVMe")
    where: Literal["cpu", "nvme"] = "nvme" if place.group() == "nvme" else "cpu"
    # A place alone is that of the optimizer (ZeRO-Offload, arXiv 2101.06840).
    stepped = "optim" in words or not re.search(r"param|weight|activation", words)
    optimizer = "device" if "update on gpu" in words else where if stepped else "none"
    return Offload(optimizer, where if re.search(r"param|weight", words) else "none")


def dispatcher_of(row: Row) -> str | None:
    """The dispatcher of experts that a field or the notes name; null where none is named."""
    stated = row["job"].get("dispatcher") or row["job"].get("moe_dispatcher")
    if stated:
        return re.sub(r"[^a-z]", "", str(stated).lower())
    found = re.search("|".join(DISPATCHERS), str(row.get("notes") or "").lower())
    return found.group() if found else None


def compiled(row: Row) -> bool:
    """Whether torch.compile ran: a field, or a word of the notes. torchtune's table adds one setting a row to those
    before it, so all of its rows but those that say eager are compiled."""
    stated, notes = row["job"].get("compile"), str(row.get("notes") or "")
    if stated is not None:
        return bool(stated)
    if "torchtune" in address_of(row):
        return "eager" not in notes
    return bool(re.search(r"compile\b", notes, re.IGNORECASE)) and not re.search(r"\b(not|without) compile", notes)


def deepcompile(row: Row) -> bool:
    """Whether DeepSpeed's compiler scheduled the collectives."""
    return "deepcompile" in str(row.get("notes") or "").lower()


def address_of(row: Row) -> str:
    """Where the row was published; names the program."""
    return str(row["source"].get("address") or "")


def recent_nvidia(row: Row) -> bool:
    """Recipes of NeMo and Megatron-Bridge: fused loss, user buffers, fused exchanges."""
    return "NVIDIA-NeMo/" in address_of(row) or "NVIDIA/NeMo:" in address_of(row)


def torchtitan(row: Row) -> bool:
    """pytorch/torchtitan, and torchao's tables over it."""
    return "torchtitan" in address_of(row) or "torchtitan" in str(row.get("notes") or "").lower()


def llm_foundry(row: Row) -> bool:
    """MosaicML's trainer: flash-attn's first version, norms in 16 bits."""
    return "llm-foundry" in address_of(row)


def sailor(row: Row) -> bool:
    """Sailor's copy of Megatron-DeepSpeed: unfused attention, gradients reduced after backward."""
    return "eth-easl/sailor" in address_of(row)


def megatron_deepspeed(row: Row) -> bool:
    """GPT of DeepSpeed's early tables: Megatron's layers without fused attention, under ZeRO."""
    family = str(row["model"].get("family") or "").lower()
    return engine_of(row) == "deepspeed" and family in ("gpt", "gpt3", "bloom")
