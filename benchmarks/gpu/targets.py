"""What is hoped for of a 1B Llama shape on an H100 or H200: reached, missed or not measured by a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class Verdict(NamedTuple):
    """One line."""

    target: str
    found: str = ""
    reached: bool | None = None
    """None: nothing was measured that could tell."""


def verdicts(rows: dict[str, list[Row]]) -> list[Verdict]:
    """Judges a run on a GPU. A row that is not ok is not counted."""
    cases, peers = (
        {row["name"]: row for row in rows.get(section, []) if row["status"] == "ok"}
        for section in ("predicted", "side by side")
    )
    by_engine = [verdict for engine in ENGINES for verdict in _of_engine(engine, cases | peers)]
    return [*by_engine, _memory([row for row in cases.values() if "memory_ratio" in row]), *map(_step(cases), STEPS)]


def _of_engine(engine: str, by_name: dict[str, Row]) -> Iterator[Verdict]:
    """Its MFU; kit's whole loop against others' whole loops."""
    mfu, own = f"{engine}: MFU of at least {MFU:.0%}", by_name.get(f"kit train, {engine}")
    over, peer = f"{engine}: at least {OVER_TRAINER} × the Trainer's defaults", f"{engine}: not slower than any peer"
    own_rows = [by_name[name] for name in ENGINES[engine] if name in by_name]
    best = max(own_rows, key=lambda row: float(row["mfu"]), default=None)
    yield Verdict(mfu, f"{best['mfu']:.1%}, {best['name']}", best["mfu"] >= MFU) if best else Verdict(mfu)
    ratios = {
        name: by_name[name]["measured_step_s"] / own["measured_step_s"] for name in PEERS if name in by_name and own
    }
    yield (
        Verdict(over, f"{ratios[TRAINER]:.3f} ×", ratios[TRAINER] >= OVER_TRAINER)
        if TRAINER in ratios
        else Verdict(over)
    )
    fastest, missing = (
        min(ratios, key=lambda name: ratios[name], default=""),
        [name for name in PEERS if name not in ratios],
    )
    told = f"; not measured: {', '.join(missing)}" if missing else ""
    # A peer that is missing could have been faster; one that is there and faster says enough.
    reached = None if not ratios or (missing and ratios[fastest] >= 1) else ratios[fastest] >= 1
    yield Verdict(peer, f"{ratios[fastest]:.3f} × {fastest}{told}" if ratios else "", reached)


def _memory(cases: list[Row]) -> Verdict:
    target = f"memory of every case within {MEMORY_ERROR:.0%} of its prediction"
    worst = max(cases, key=lambda row: abs(row["memory_ratio"] - 1), default=None)
    within = sum(abs(row["memory_ratio"] - 1) <= MEMORY_ERROR for row in cases)
    if worst is None:
        return Verdict(target)
    told = f"{within} of {len(cases)}; worst {worst['memory_ratio']:.3f}, {worst['name']}"
    return Verdict(target, told, within == len(cases))


def _step(cases: dict[str, Row]) -> Callable[[str], Verdict]:
    def judged(name: str) -> Verdict:
        target = f"{name}: step time within {STEP_ERROR:.0%} of its prediction"
        ratio = cases.get(name, {}).get("step_ratio")
        return Verdict(target, f"{ratio:.3f}", abs(ratio - 1) <= STEP_ERROR) if ratio else Verdict(target)

    return judged
