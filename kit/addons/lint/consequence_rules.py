"""Rules of the memory and time of a DeepSpeed configuration, predicted by the cost model. Most need a model and a
cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kit.addons.lint.config import AUTO, Config, setting
from kit.addons.lint.described import DEFAULT_SIZES, described, precision
from kit.addons.lint.finding import Finding
from kit.addons.lint.rule import Case, Rule, check, findings, table
from kit.cost.estimate import predict
from kit.cost.hardware import usable_gib
from kit.cost.memory.deepspeed_sizes import fits_twice, least_param_buffer, unsharded_bytes
from kit.cost.memory.offload import HOST_SHARE, host_ram_gib_per_node
from kit.cost.memory.peak import peak_gib
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.errors import SpecError
from kit.specs.layout import Layout
from kit.units import GIB, to_gib

WORTH_SAYING = 1.1
"""Smallest ratio of step times that is reported; less is within the error of a prediction."""
_MUCH_GIB = 4
_BUCKET = "zero_optimization.reduce_bucket_size"
_BUFFER = "zero_optimization.offload_param.buffer_size"


@dataclass(frozen=True, kw_only=True)
class Priced(Config):
    """A configuration beside the workload that it describes."""

    work: Workload


@check(
    "deepspeed",
    Rule("memory-not-judged", "ds, accelerate, script", "why nothing is said of memory", "silence is no judgement"),
)
def consequences(config: Config) -> Iterator[Finding]:
    """What the cost model says of a configuration, or why it says nothing."""
    try:
        found = Priced(**vars(config), work=described(config))
    except SpecError as reason:
        if config.model is not None or config.cluster is not None:
            fix = "kit memory judges a layout by itself"
            yield config.finding("memory-not-judged", "note", "", str(reason), fix)
        return
    yield from findings("priced", found)


def _buckets(config: Config) -> tuple[int, float, float]:
    """Their number, elements of one, and GiB of all. stage_1_and_2.py allocates the full reduce bucket, and a second
    one with overlap_comm."""
    elements = config.number(_BUCKET) or DEFAULT_SIZES["reduce_bucket_size"]
    copies = 2 if config.on("zero_optimization.overlap_comm") else 1
    return copies, elements, elements * copies * (4 if precision(config) == "fp32" else 2) / GIB


def _gradients(config: Config) -> float:
    """Elements of all gradients; infinite without a model."""
    return count(config.model).total if config.model else math.inf


def _bucket_case(outgrows: bool, more: str, fix: str) -> Case[Config]:
    """``outgrows``: of a bucket that has more elements than all gradients, or of another one that is large."""
    return Case(
        "warning",
        lambda c: _BUCKET if c.has(_BUCKET) else "zero_optimization.stage",
        lambda c: (
            c.stage in (1, 2)
            and c.get(_BUCKET) != AUTO
            and (_buckets(c)[1] > _gradients(c)) == outgrows
            and (outgrows or _buckets(c)[2] > _MUCH_GIB)
        ),
        lambda c: (
            "{} bucket(s) of {:.0e} elements take {:.1f} GiB".format(*_buckets(c))
            + more.format(c.model.name if c.model else "")
        ),
        lambda c: fix.format(max(1, _gradients(c) // 8)),
    )


def _moved(priced: Priced) -> list[str]:
    """The parts that are offloaded."""
    return [name for name in ("optimizer", "param") if getattr(priced.work.layout, f"offload_{name}") != "none"]


def _lacks(priced: Priced, gib: float) -> bool:
    """Whether a node has no room for so much host memory."""
    there = priced.work.cluster.host_ram_gib
    return there is not None and gib > HOST_SHARE * there


def _ranks(priced: Priced) -> int:
    """Processes of a node."""
    return priced.work.layout.world_size // priced.work.cluster.num_nodes


def _loading_gib(priced: Priced) -> float:
    """Host memory of a node while processes make their flat copies: from_pretrained maps the files, and the model goes
    to the GPU before it is flat."""
    return host_ram_gib_per_node(priced.work) + _ranks(priced) * 2 * to_gib(unsharded_bytes(priced.work))


def _peak_if_recomputed(priced: Priced) -> float:
    return peak_gib(priced.work.with_layout(dataclasses.replace(priced.work.layout, recompute="full")))


def _fits_if_recomputed(priced: Priced) -> bool:
    fits = _peak_if_recomputed(priced) <= usable_gib(priced.work.cluster.gpu)
    return fits and priced.work.layout.recompute == "none"


def _least_buffer(priced: Priced) -> int:
    return least_param_buffer(priced.work.model, priced.work.layout)


def _batch(work: Workload) -> str:
    return f"{work.model.name} at {work.job.seq_length} tokens, micro batch {work.layout.micro_batch_size}"


def _predicted(priced: Priced) -> str:
    work, step = priced.work, predict(priced.work)
    largest, longest_s = max(step.step_time_components_s.items(), key=lambda item: item[1])
    return (
        f"{_batch(work)} on {work.layout.world_size} {work.cluster.gpu.name}: about {peak_gib(work):.0f} GiB a GPU, "
        f"{step.step_time_s:.2g} s a step ({largest} {longest_s:.2g} s), {step.mfu:.0%} MFU"
    )


@check(
    "priced",
    Rule(
        "offload-for-nothing",
        "ds, with a model and GPUs",
        "offload of state that fits on the GPUs",
        "a longer step, by the cost model",
    ),
    Rule(
        "stage-for-nothing",
        "ds, with a model and GPUs",
        "stage 3 where 1 or 2 fits and is faster",
        "weights gathered twice a micro batch, by the cost model",
    ),
)
def for_nothing(priced: Priced) -> Iterator[Finding]:
    """The first setting that costs time to save memory which is not needed. The next one would be compared with the
    same step."""
    work = priced.work
    for rule, key, words, layout in _lighter(work.layout) if work.layout.engine == "deepspeed" else ():
        other, now_s = work.with_layout(layout), predict(work).step_time_s
        then_s = predict(other).step_time_s
        if now_s > WORTH_SAYING * then_s and peak_gib(other) <= usable_gib(work.cluster.gpu):
            why = (
                f"{_batch(work)} fits {words}, and a step then takes about {then_s:.2g} s; now it takes {now_s:.2g}, "
                f"{now_s / then_s:.1f} times as long"
            )
            yield priced.finding(rule, "warning", f"zero_optimization.{key}", why, f"train {words}")
            return


def _lighter(layout: Layout) -> Iterator[tuple[str, str, str, Layout]]:
    """(rule, key, words, layout) of similar layouts that keep more state on the GPU and communicate less."""
    bare = dataclasses.replace(layout, offload_optimizer="none", offload_param="none")
    if bare != layout:
        key = "offload_optimizer" if layout.offload_optimizer != "none" else "offload_param"
        yield "offload-for-nothing", key, "without offload", bare
    for stage in (1, 2) if layout.zero_stage == 3 else ():
        yield "stage-for-nothing", "stage", f"at stage {stage}", dataclasses.replace(bare, zero_stage=stage)


table(
    "deepspeed",
    {
        Rule(
            "bucket-memory",
            "ds, with a model",
            "buckets larger than all gradients, or of several GiB",
            "memory that nothing uses",
        ): (
            _bucket_case(True, ", more than all gradients of {} together", "use at most {:.0e}"),
            _bucket_case(False, "; links are full with a tenth", "use 5e8 or less"),
        ),
    },
)
table(
    "priced",
    {
        Rule(
            "host-ram",
            "ds, with a model and GPUs",
            "more offloaded than a node's host memory holds, pinned or not, or more copied there while loading",
            "killed by the kernel, or no page can be locked",
        ): (
            Case(
                "error",
                lambda c: f"zero_optimization.offload_{_moved(c)[0]}",
                lambda c: _moved(c) and _lacks(c, host_ram_gib_per_node(c.work)),
                lambda c: (
                    f"needs {host_ram_gib_per_node(c.work):.0f} GiB of host memory a node"
                    + ", pinned and never swapped out"
                    * any(c.on(f"zero_optimization.offload_{name}.pin_memory") for name in _moved(c))
                    + f", and {c.work.cluster.name} has {c.work.cluster.host_ram_gib:.0f}"
                ),
                "offload to nvme, or use more nodes",
            ),
            Case(
                "error",
                "zero_optimization.stage",
                lambda c: (
                    c.reader in ("trainer", "accelerate")
                    and c.work.layout.zero_stage in (1, 2)
                    and not fits_twice(c.work)
                    and not _lacks(c, host_ram_gib_per_node(c.work))
                    and _lacks(c, _loading_gib(c))
                ),
                lambda c: (
                    f"a GPU has no room for the weights twice, so {_ranks(c)} processes make their flat copy in host "
                    f"memory: {_loading_gib(c):.0f} GiB while they load, and {c.work.cluster.name} has "
                    f"{c.work.cluster.host_ram_gib:.0f}"
                ),
                "use stage 3, or kit train, whose weights take no memory before they are flat",
            ),
        ),
        Rule(
            "does-not-fit", "ds, with a model and GPUs", "more memory than a GPU has", "out of memory at the first step"
        ): (
            Case(
                lambda c: "warning" if _fits_if_recomputed(c) else "error",
                "zero_optimization.stage",
                lambda c: peak_gib(c.work) > usable_gib(c.work.cluster.gpu),
                lambda c: (
                    f"{_batch(c.work)} peaks at about {peak_gib(c.work):.0f} GiB "
                    f"with{'' if c.work.layout.recompute == 'full' else 'out'} gradient checkpointing; "
                    f"{c.work.cluster.gpu.name} has {usable_gib(c.work.cluster.gpu):.0f} usable"
                ),
                lambda c: (
                    f"turn gradient checkpointing on (about {_peak_if_recomputed(c):.0f} GiB)"
                    if _fits_if_recomputed(c)
                    else f"use a higher stage, offload or more GPUs (kit plan {c.work.model.name} --gpus … finds one)"
                ),
            ),
        ),
        Rule(
            "prediction",
            "ds, with a model and GPUs",
            "nothing wrong: memory, step and MFU that the cost model predicts",
            "its errors are in [accuracy.md](accuracy.md)",
        ): (Case("note", "", lambda c: True, _predicted, "kit plan looks for a better layout"),),
        # swap_tensor/partitioned_param_swapper.py, get_buffer, asserts that a shard of a weight fits in a buffer.
        Rule("buffer-size", "ds, with a model and GPUs", "an NVMe buffer below the largest weight", "stops the run"): (
            Case(
                "error",
                lambda c: _BUFFER if c.has(_BUFFER) else "zero_optimization.offload_param",
                lambda c: (
                    c.work.layout.param_buffer_size is not None and c.work.layout.param_buffer_size < _least_buffer(c)
                ),
                lambda c: (
                    f"a buffer of {c.work.layout.param_buffer_size:,} elements; a rank's part of the largest weight of "
                    f"{c.work.model.name} has {_least_buffer(c):,}"
                ),
                lambda c: f"write a buffer_size of {_least_buffer(c)} or more",
                lambda c: setting(_BUFFER, _least_buffer(c)),
            ),
        ),
    },
)
