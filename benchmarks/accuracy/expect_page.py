"""``docs/how-far-off.md``: the step-time error to expect for each kind of plan, in plain words."""

from __future__ import annotations

from benchmarks.accuracy.bands import Band
from tests.support.page import header, table

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
"""Band → a user's name for such plans."""
WORDS = """
A plan's step time is a prediction. kit compared such predictions with published runs. Each run was predicted without
anything that kit learnt from the run's own source. Each line of the table is one kind of plan:

- **half within**: half of the runs have a smaller error than this;
- **most within**: four of five runs have a smaller error. With fewer than twelve runs, or only one source, this is the
  largest error ("worst").

Kinds that have no line were never compared: disks (ZeRO-Infinity), AMD's GPUs other than the MI300X, workstation GPUs,
context parallelism on Hugging Face models, DeepSpeed with experts, FlashAttention 3 and 4 in plans. Short steps of
DeepSpeed on one node are predicted worst: below a second a step, the host and the engine's own Python decide, and a run
may take twice as long as predicted. If the fabric is slower than the cluster file says, the step time is off by as
much. `kit plan --calibration FILE` corrects predictions by your own runs. [The accuracy page](accuracy.md) says how far
off memory may be.
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
