"""Rules of batch sizes. DeepSpeed checks these only after all GPUs have started."""

from __future__ import annotations

from collections.abc import Iterator

from kit.addons.lint.config import AUTO, Config, removal
from kit.addons.lint.finding import Finding
from kit.addons.lint.rule import Case, Each, Rule, check, table

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
        ): (
            Each(
                "error",
                lambda c, key: key,
                lambda c: [key for key in BATCH_KEYS if _no_batch_size(c, key)],
                lambda c, key: f"{c.number(key)} is not a batch size",
                "use a whole number from 1 on",
            ),
        ),
    },
)


@check("deepspeed")
def batch_arithmetic(config: Config) -> Iterator[Finding]:
    """train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · data-parallel ranks."""
    total, micro, given = map(config.number, BATCH_KEYS)
    if total is None or micro is None or min(total, micro) < 1 or config.get(BATCH_KEYS[2]) == AUTO:
        return
    ranks, accumulation = data_parallel_size(config), 1 if given is None else given
    of_each = micro * (ranks or 1)  # samples of all ranks in one micro batch
    unit = of_each * max(1, accumulation)
    if total == unit if ranks and given is not None else total % unit == 0:  # DeepSpeed works out what is not given
        return
    step, product = of_each if ranks else unit, f"micro batch {micro:g} · accumulation {accumulation:g}"
    below, above = int(total // step * step), int((total // step + 1) * step)
    sizes = f"{below} or {above}" if below else f"{above}"
    if ranks is None:
        why, hint = f"{total:g} is not a multiple of {product}: no number of GPUs makes it true", f"use {sizes}"
    else:
        why = f"{total:g} is not {product} · {ranks} data-parallel ranks = {unit:g}, and DeepSpeed refuses to start"
        fitting = f"use gradient_accumulation_steps={int(total // step)}"
        hint = f"use a train_batch_size of {sizes}" if total % step else fitting
    fix = f"{hint}, or leave train_batch_size out, which DeepSpeed then works out"
    yield config.finding("batch-arithmetic", "error", "train_batch_size", why, fix, removal("train_batch_size"))
