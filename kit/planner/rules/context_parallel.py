"""Rules of context parallelism: ranks that split each sequence, by a ring (p2p), by all-gather, or by all-to-alls over
heads (a2a, Ulysses)."""

from __future__ import annotations

from math import gcd

from kit.cost.workload import Workload
from kit.planner.rules.rule import rule
from kit.specs.layout import EngineName, divisors
from kit.specs.text import one_of

_CP_COMM_TYPES: dict[EngineName, tuple[str, ...]] = {
    "torch": ("p2p", "a2a"),
    "deepspeed": ("a2a",),
    "megatron": ("all_gather", "p2p"),
}


@rule(
    message=lambda w: (
        f"cp={w.layout.cp} with cp_comm_type={w.layout.cp_comm_type}, which engine={w.layout.engine} does not have; "
        f"use {one_of(_CP_COMM_TYPES[w.layout.engine])}"
    )
)
def cp_comm_type(w: Workload) -> bool:
    """Each engine supports only some values of ``cp_comm_type``; with cp=1 it is not read."""
    way = w.layout.cp_comm_type
    return way not in _CP_COMM_TYPES[w.layout.engine] and (w.layout.cp > 1 or way != "all_gather")


# ---------------------------------------------------------------- Hugging Face models (torch, deepspeed)


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"tp={w.layout.tp} with cp={w.layout.cp} on engine={w.layout.engine}, which has one or the other; use "
        "engine=megatron"
    ),
)
def tp_or_cp(w: Workload) -> bool:
    """Ulysses and tensor parallelism both split the heads; FSDP2 was not tested with both."""
    return w.layout.tp > 1 and w.layout.cp > 1


@rule(
    "torch",
    message=lambda w: (
        f"cp={w.layout.cp} with zero_stage={w.layout.zero_stage} on engine=torch: FSDP2 sums the gradients of a "
        "sequence's parts; use zero_stage=2 or 3"
    ),
)
def torch_cp_needs_fsdp2(w: Workload) -> bool:
    """kit/engines/torch/engine.py: DDP has one process group, of all ranks, and averages over dp."""
    return w.layout.cp > 1 and w.layout.zero_stage == 0


@rule(
    "torch",
    message=lambda w: (
        f"cp={w.layout.cp} on engine=torch with {w.model.name}: it was tested with decoders of the families that kit "
        "describes; use cp=1, or engine=megatron"
    ),
)
def torch_cp_family(w: Workload) -> bool:
    """A recurrent layer needs the state of the sequence's part before."""
    return w.layout.cp > 1 and w.model.approximate is not None


@rule(
    "torch",
    message=lambda w: f"cp={w.layout.cp} with precision={w.job.precision} on engine=torch was not tested; use bf16",
)
def torch_cp_precision(w: Workload) -> bool:
    """torchao's fp8 was tested without context parallelism."""
    return w.layout.cp > 1 and w.job.precision == "fp8"


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"cp={w.layout.cp} on engine={w.layout.engine} with {w.model.name}, for whose attention there is no flash "
        "kernel: eager attention needs a mask, which is dropped; use cp=1, or engine=megatron"
    ),
)
def cp_needs_fused_attention(w: Workload) -> bool:
    """ulysses_sp.py, register_with_transformers, refuses eager attention. Softcaps and sinks change the scores, which
    a flash kernel does not return to the ring."""
    return w.layout.cp > 1 and not w.model.traits.fused_attention


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"cp={w.layout.cp} on engine={w.layout.engine} with the sliding window of {w.model.name} (sliding_window="
        f"{w.model.sliding_window}): attention masks are dropped; use cp=1, or engine=megatron"
    ),
)
def cp_without_window(w: Workload) -> bool:
    """DeepSpeed's Ulysses drops attention masks silently; kit's attention under engine=torch takes none."""
    return w.layout.cp > 1 and w.model.windowed(w.job.seq_length)


@rule(
    "deepspeed",
    message=lambda w: (
        f"cp={w.layout.cp} on engine=deepspeed with {w.model.name}: Ulysses reads num_key_value_heads, which "
        f"configurations of family {w.model.family} do not have; use cp=1, or engine=torch or megatron"
    ),
)
def ulysses_family(w: Workload) -> bool:
    """UlyssesSPAttentionHF reads num_key_value_heads of the model's configuration."""
    return w.layout.cp > 1 and not w.model.traits.ulysses


# ---------------------------------------------------------------- all-to-alls over heads


def _ulysses(w: Workload) -> bool:
    return w.layout.cp_comm_type == "a2a"


def _whole_cp(w: Workload) -> list[int]:
    """Sizes of Ulysses that the GPUs, the heads and the sequence allow."""
    heads = w.model.num_key_value_heads
    both = gcd(w.cluster.num_gpus, w.model.num_attention_heads, w.job.seq_length)
    return [cp for cp in divisors(both) if heads % cp == 0 or cp % heads == 0]


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"cp={w.layout.cp} does not divide num_attention_heads={w.model.num_attention_heads} of {w.model.name}; "
        f"use {one_of(_whole_cp(w))}"
    ),
)
def ulysses_divides_heads(w: Workload) -> bool:
    """UlyssesSPAttentionHF's constructor: every rank has whole query heads."""
    return w.layout.cp > 1 and _ulysses(w) and w.model.num_attention_heads % w.layout.cp != 0


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"cp={w.layout.cp} is neither a divisor nor a multiple of num_key_value_heads={w.model.num_key_value_heads} of "
        f"{w.model.name}; use {one_of(_whole_cp(w))}"
    ),
)
def ulysses_fits_kv_heads(w: Workload) -> bool:
    """UlyssesSPAttentionHF's constructor: key/value heads are split or copied evenly."""
    heads, cp = w.model.num_key_value_heads, w.layout.cp
    return w.layout.cp > 1 and _ulysses(w) and heads % cp != 0 and cp % heads != 0


@rule(
    "torch",
    "deepspeed",
    message=lambda w: (
        f"cp={w.layout.cp} does not divide seq_length={w.job.seq_length}; use {one_of(_whole_cp(w))}, or another length"
    ),
)
def ulysses_divides_sequence(w: Workload) -> bool:
    """Ulysses gives every rank an equal part of the sequence."""
    return w.layout.cp > 1 and _ulysses(w) and w.job.seq_length % w.layout.cp != 0


# ---------------------------------------------------------------- zig-zag chunks: all-gather and ring


@rule(
    "torch",
    "megatron",
    message=lambda w: (
        f"cp={w.layout.cp} with seq_length={w.job.seq_length}: 2·cp={2 * w.layout.cp} equal chunks are needed; "
        f"use a multiple of {2 * w.layout.cp}"
    ),
)
def context_parallel(w: Workload) -> bool:
    """The zig-zag order gives each rank two of 2·cp chunks, so all ranks compute the same share of the causal mask."""
    return w.layout.cp > 1 and w.layout.cp_comm_type != "a2a" and w.job.seq_length % (2 * w.layout.cp) != 0


def _ring(w: Workload) -> bool:
    """Whether kit's ring attention runs, if cp > 1 (kit/engines/kernels/ring_attention.py). It supports full causal
    attention with torch's flash kernels."""
    return w.layout.cp_comm_type == "p2p"


def _no_ring(w: Workload) -> str:
    return "a2a" if w.layout.engine == "torch" else "all_gather"


@rule(
    "torch",
    "megatron",
    message=lambda w: (
        f"cp_comm_type=p2p with the latent attention of {w.model.name}, whose values are narrower than its keys; "
        f"use {_no_ring(w)}"
    ),
)
def ring_without_mla(w: Workload) -> bool:
    """Latent attention's values are narrower than its queries and keys."""
    return w.layout.cp > 1 and _ring(w) and w.model.latent is not None


@rule(
    "megatron",
    message=lambda w: (
        f"cp_comm_type=p2p with {w.model.name}, for whose attention there is no flash kernel; use all_gather"
    ),
)
def ring_needs_fused_attention(w: Workload) -> bool:
    """Softcaps and sinks change the scores, which a flash kernel does not return."""
    return (
        w.layout.cp > 1 and _ring(w) and (not w.model.traits.fused_attention or w.model.attention_softcap is not None)
    )


@rule(
    "megatron",
    message=lambda w: (
        f"cp_comm_type=p2p with sliding_window={w.model.sliding_window} of {w.model.name}: the ring computes whole "
        "attention; use all_gather"
    ),
)
def ring_without_window(w: Workload) -> bool:
    """Ring attention passes all keys and values to every rank."""
    return w.layout.cp > 1 and _ring(w) and w.model.windowed(w.job.seq_length)


@rule(
    "torch",
    "megatron",
    message=lambda w: (
        f"cp_comm_type=p2p with precision=fp32, for which CUDA has no flash kernel; use {_no_ring(w)}, or bf16"
    ),
)
def ring_needs_16_bits(w: Workload) -> bool:
    """torch's flash kernels on CUDA are for fp16 and bf16."""
    return w.layout.cp > 1 and _ring(w) and w.job.precision == "fp32" and w.cluster.gpu.device == "cuda"


@rule(
    "torch",
    message=lambda w: (
        f"attention_kernel={w.layout.attention_kernel} with cp_comm_type=p2p, whose parts are merged by "
        "FlashAttention-2's log-sum-exp; leave it out, or use a2a"
    ),
)
def ring_kernel(w: Workload) -> bool:
    """kit/engines/kernels/ring_attention.py calls that kernel itself."""
    return w.layout.cp > 1 and _ring(w) and w.layout.attention_kernel != "default"
