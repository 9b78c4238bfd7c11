"""What is hoped for of a 1B Llama shape on an H100 or H200: reached, missed or not measured by a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

MFU = 0.55
OVER_TRAINER = 1.3
MEMORY_ERROR = 0.05
STEP_ERROR = 0.1
ENGINES = {
    "torch": ("1B, torch", "1B, torch, cuDNN attention", "kit train, torch"),
    "deepspeed": ("1B, deepspeed", "kit train, deepspeed"),
    "megatron": ("1B, megatron", "kit train, megatron", "Megatron-core, Transformer Engine"),
}
"""Rows of the recipe by each engine; the best counts."""
TRAINER = "Hugging Face Trainer, defaults"
PEERS = (
    "plain PyTorch",
    "plain PyTorch, torch.compile",
    TRAINER,
    "Hugging Face Trainer, best flags",
    "bare DeepSpeed",
    "Megatron-core, Transformer Engine",
)
STEPS = ("8B, LoRA", "8B, ZeRO-Offload")
"""Cases whose step time is to be as predicted."""


@dataclass(frozen=True)
class Verdict:
    """One line."""

    target: str
    found: str
    reached: bool | None
    """None: nothing was measured that could tell."""


def verdicts(rows: dict[str, list[Row]]) -> list[Verdict]:
    """Judges a run on a GPU. A row that is not ok is not counted."""
    cases = {row["name"]: row for row in rows.get("predicted", []) if row["status"] == "ok"}
    peers = {row["name"]: row for row in rows.get("side by side", []) if row["status"] == "ok"}
    found = []
    for engine in ENGINES:
        found += [_mfu(engine, cases | peers), *_speed(engine, cases | peers)]
    return [*found, _memory(list(cases.values())), *(_step(name, cases.get(name)) for name in STEPS)]


def _mfu(engine: str, by_name: dict[str, Row]) -> Verdict:
    target = f"{engine}: MFU of at least {MFU:.0%}"
    best = max((by_name[name] for name in ENGINES[engine] if name in by_name), key=lambda row: row["mfu"], default=None)
    if best is None:
        return Verdict(target, "", None)
    return Verdict(target, f"{best['mfu']:.1%}, {best['name']}", best["mfu"] >= MFU)


def _speed(engine: str, by_name: dict[str, Row]) -> list[Verdict]:
    """kit's whole loop against others' whole loops."""
    over = f"{engine}: at least {OVER_TRAINER} × the Trainer's defaults"
    peer = f"{engine}: not slower than any peer"
    own, trainer = by_name.get(f"kit train, {engine}"), by_name.get(TRAINER)
    others = [by_name[name] for name in PEERS if name in by_name]
    if own is None or not others:
        return [Verdict(over, "", None), Verdict(peer, "", None)]
    fastest = min(others, key=lambda row: row["measured_step_s"])
    ratio = fastest["measured_step_s"] / own["measured_step_s"]
    missing = [name for name in PEERS if name not in by_name]
    told = f"{ratio:.3f} × {fastest['name']}" + (f"; not measured: {', '.join(missing)}" if missing else "")
    # A peer that is missing could have been faster; one that is there and faster says enough.
    against = Verdict(peer, told, None if missing and ratio >= 1 else ratio >= 1)
    if trainer is None:
        return [Verdict(over, "", None), against]
    ratio = trainer["measured_step_s"] / own["measured_step_s"]
    return [Verdict(over, f"{ratio:.3f} ×", ratio >= OVER_TRAINER), against]


def _memory(cases: list[Row]) -> Verdict:
    target = f"memory of every case within {MEMORY_ERROR:.0%} of its prediction"
    measured = [row for row in cases if "memory_ratio" in row]
    if not measured:
        return Verdict(target, "", None)
    worst = max(measured, key=lambda row: abs(row["memory_ratio"] - 1))
    within = sum(abs(row["memory_ratio"] - 1) <= MEMORY_ERROR for row in measured)
    told = f"{within} of {len(measured)}; worst {worst['memory_ratio']:.3f}, {worst['name']}"
    return Verdict(target, told, within == len(measured))


def _step(name: str, row: Row | None) -> Verdict:
    target = f"{name}: step time within {STEP_ERROR:.0%} of its prediction"
    if row is None or "step_ratio" not in row:
        return Verdict(target, "", None)
    return Verdict(target, f"{row['step_ratio']:.3f}", abs(row["step_ratio"] - 1) <= STEP_ERROR)
