"""``docs/how-far-off.md``: in plain words, how far off a user must expect the step time of each kind of plan to be."""

from __future__ import annotations

from benchmarks.accuracy.bands import Band
from benchmarks.page import header, table

KINDS = {
    "transformer_engine, dense": "Megatron with Transformer Engine, dense model",
    "transformer_engine, dense, fp8": "the same, in 8 or 4 bits",
    "transformer_engine, experts": "Megatron with Transformer Engine, mixture of experts",
    "transformer_engine, experts, fp8": "the same, in 8 or 4 bits",
    "transformer_engine, dense, LoRA": "Megatron with Transformer Engine, LoRA",
    "huggingface with deepspeed, dense": "DeepSpeed on a Hugging Face model, without offload",
    "huggingface with deepspeed, dense, offload": "the same, with the optimizer in host memory",
    "other programs with deepspeed, dense": "DeepSpeed in other programs, or compiled",
    "other programs with fsdp, dense": "FSDP",
    "other programs with fsdp, dense, fp8": "FSDP in fp8",
    "other programs with ddp, dense": "one GPU, or DDP",
    "other programs with ddp, dense, LoRA": "one GPU with LoRA",
}
"""Band → what a user calls such a plan."""
WORDS = """
A plan's step time is a prediction. These are the published runs of each kind that it was compared with, each predicted
without what its own source taught. **Half within** is the error that half of the runs stay below, **most within** the
one that four of five stay below; where there are fewer than twelve runs, or one source, it is the worst of them.

What no line here covers was never compared: disks (ZeRO-Infinity), MI250X and workstation GPUs, context parallelism on
Hugging Face models, DeepSpeed with experts. Small steps of DeepSpeed on one node are the worst case: below a second a
step the host and the engine's own Python decide, and a run may take twice as long as predicted. A run on a fabric that
is slower than the cluster file says is off by as much. `kit plan --calibration` takes what a first run measured.
Memory has [a page of its own](accuracy.md).
"""


def as_markdown(bands: list[Band], source: str) -> str:
    """The whole page."""
    by_regime = {band.regime: band for band in bands}
    rows = [
        (words, band.rows, band.groups, f"± {band.median:.0%}", f"± {band.width:.0%}{' (worst)' * band.few}")
        for regime, words in KINDS.items()
        if (band := by_regime.get(regime))
    ]
    lines = [
        header("How far off a plan's step time may be", f"python -m benchmarks.accuracy throughput --data {source}"),
        *WORDS.strip().splitlines(),
        "",
        table(("kind of plan", "runs", "groups of runs", "half within", "most within"), rows),
    ]
    return "\n".join(lines) + "\n"
