"""Rules of batch sizes. DeepSpeed checks these only after all GPUs have started."""

from __future__ import annotations

from collections.abc import Iterator

from kit.addons.lint.config import AUTO, Config, removal
from kit.addons.lint.finding import Finding
from kit.addons.lint.rule import Case, Rule, check, table

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def data_parallel_size(config: Config) -> int | None:
    """Number of data-parallel ranks; None if the number of ranks is unknown, or smaller than that of the ranks which
    share a model."""
    ranks = config.processes or (config.cluster and config.cluster.num_gpus)
    if not ranks:
        return None
    shared = (config.number("tensor_parallel.autotp_size") or 1) * (config.number("sequence_parallel_size") or 1)
    return int(ranks // max(1, shared)) or None


def _no_batch_size(config: Config, key: str) -> bool:
    size = config.number(key)
    return size is not None and (size < 1 or size != int(size))


def _whole(key: str) -> Case[Config]:
    return Case(
        "error",
        key,
        lambda c: _no_batch_size(c, key),
        lambda c: f"{c.number(key)} is not a batch size",
        "use a whole number from 1 on",
    )


table(
    "deepspeed",
    {
        # runtime/config.py, _set_batch_related_parameters: one of the first two must be there.
        Rule("batch-missing", "ds", "no batch size at all", "DeepSpeed refuses to guess"): (
            Case(
                "error",
                "",
                lambda c: not any(map(c.has, BATCH_KEYS[:2])),
                "neither train_batch_size nor train_micro_batch_size_per_gpu is given, and DeepSpeed refuses to guess",
                "add train_micro_batch_size_per_gpu",
            ),
        ),
        Rule(
            "batch-arithmetic",
            "ds, accelerate",
            "batch sizes whose product is wrong, alone or on the GPUs given",
            "an assertion fails when all GPUs are already allocated",
        ): tuple(map(_whole, BATCH_KEYS)),
    },
)


@check("deepspeed")
def batch_arithmetic(config: Config) -> Iterator[Finding]:
    """train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · data-parallel ranks."""
    total, micro = config.number("train_batch_size"), config.number("train_micro_batch_size_per_gpu")
    if total is None or micro is None or min(total, micro) < 1:
        return
    given = config.number("gradient_accumulation_steps")
    if config.get("gradient_accumulation_steps") == AUTO:
        return
    steps = given if given is not None else 1
    ranks = data_parallel_size(config)
    if given is None and ranks is not None and total % (micro * ranks) == 0:
        return  # DeepSpeed computes gradient_accumulation_steps
    unit = micro * max(1, steps) * (ranks or 1)
    if total % unit == 0 and (ranks is None or total == unit):
        return
    product = f"micro batch {micro:g} · accumulation {steps:g}"
    if ranks is None:
        below, above = int(total // unit * unit), int((total // unit + 1) * unit)
        sizes = f"{below} or {above}" if below else f"{above}"
        yield config.finding(
            "batch-arithmetic",
            "error",
            "train_batch_size",
            f"{total:g} is not a multiple of {product}: no number of GPUs makes it true",
            f"use {sizes}, or leave train_batch_size out, which DeepSpeed then works out",
            removal("train_batch_size"),
        )
        return
    whole = micro * ranks
    fitting = total % whole == 0
    below, above = int(total // whole * whole), int((total // whole + 1) * whole)
    hint = (
        f"use gradient_accumulation_steps={int(total // whole)}"
        if fitting
        else f"use a train_batch_size of {f'{below} or ' if below else ''}{above}"
    )
    yield config.finding(
        "batch-arithmetic",
        "error",
        "train_batch_size",
        f"{total:g} is not {product} · {ranks} data-parallel ranks = {unit:g}, and DeepSpeed refuses to start",
        f"{hint}, or leave train_batch_size out, which DeepSpeed then works out",
        removal("train_batch_size"),
    )
