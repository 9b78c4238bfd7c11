"""Rules of unknown, removed and deprecated keys, and of values written as text."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kit.addons.lint.config import Config, removal, setting, truth
from kit.addons.lint.finding import REMOVE, Changes, Finding, Severity
from kit.addons.lint.known_keys import KnownKeys, known_keys, near
from kit.addons.lint.rule import Case, Each, Rule, check, table
from kit.specs.extra import flat

REPLACEMENTS = {
    "amp": "use fp16, bf16 or torch_autocast",
    "nebula": "use the checkpoint section",
    "elasticity": "give batch sizes for the GPUs there are, or emit again from the recipe",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size at stage 3",
}
"""Removed key → its replacement, if there is one."""
KNOWN_SLIPS = {
    "aio.thread_count": "intra_op_parallelism",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "max_grad_norm": "gradient_clipping",
    "gradient_clip": "gradient_clipping",
}
"""Common wrong name → right name, where a spelling check would not find it."""
BELONGS_INSIDE = "offload_optimizer", "offload_param", "overlap_comm", "contiguous_gradients", "reduce_bucket_size"
"""Keys of zero_optimization that people write at the top level, where DeepSpeed ignores them."""


_MOST_UNKNOWN = 20


@check(
    "deepspeed",
    Rule("duplicate-key", "ds", "a key twice in one object", "refused by DeepSpeed; elsewhere the last one wins"),
    Rule("json-syntax", "ds", "comments, trailing commas", "DeepSpeed forgives them, accelerate and the Trainer stop"),
)
def json_syntax(config: Config) -> Iterator[Finding]:
    """DeepSpeed's hjson accepts comments and trailing commas; the json of accelerate and the Trainer does not."""
    name, of_kind = config.document.name, {item.kind: item for item in reversed(config.irregularities)}
    for item in config.irregularities:
        if item.kind == "duplicate key":
            why = "is there twice: DeepSpeed refuses the file, json silently takes the last"
            yield Finding("duplicate-key", "error", name, item.line, item.detail, why, "keep one")
        elif item is of_kind[item.kind]:
            severity: Severity = "note" if config.reader == "deepspeed" else "warning"
            why = f"a {item.kind} is no JSON: deepspeed.initialize forgives it, accelerate and the Trainer stop at it"
            rewritten = ((("",), REMOVE),)  # writing the file as regular JSON is the fix
            yield Finding("json-syntax", severity, name, item.line, "", why, "remove it", rewritten)


@check(
    "deepspeed",
    Rule(
        "unknown-key",
        "ds, accelerate",
        "misspelt, misplaced or invented keys, with the nearest valid one",
        "DeepSpeed ignores them at the top level, accelerate inside a section",
    ),
)
def unknown_key(config: Config) -> Iterator[Finding]:
    """DeepSpeed ignores an unknown key at the top level and raises inside its pydantic sections."""
    yield from unknown_keys(config, known_keys("DeepSpeed"))


def unknown_keys(config: Config, known: KnownKeys) -> Iterator[Finding]:
    """Findings for keys that are not in the reader's table; if there are many, the first ones and their number."""
    found = list(_unknown(config.document.data, known.tree, ()))
    if len(found) > _MOST_UNKNOWN:
        why = f"{len(found)} keys are not {known.reader}'s; the first {_MOST_UNKNOWN} are listed"
        yield config.finding("unknown-key", "error", "", why, "remove them")
    for path in found[:_MOST_UNKNOWN]:
        dotted = ".".join(path)
        if dotted in BELONGS_INSIDE:
            inside = f"zero_optimization.{dotted}"
            changes = (*removal(dotted), *setting(inside, config.get(dotted)))
            fix = f"move it into zero_optimization: {inside}"
            yield config.finding("unknown-key", "error", dotted, "nothing reads it here", fix, changes)
        elif not (dotted in known.removed or path[-1].startswith("_")):
            # Another rule covers removed keys; people use keys with a leading underscore as comments.
            right = KNOWN_SLIPS.get(dotted) or near(path[-1].lower(), known.inside(path[:-1]) or ())
            refused = (path[0] if len(path) > 1 else "") in known.refuses
            yield config.finding(
                "unknown-key",
                "error" if refused or right else "warning",
                dotted,
                f"no key of {known.reader} {known.version}: {known.effect}",
                f"did you mean {right}?" if right else "remove it",
                config.moved(dotted, ".".join((*path[:-1], right))) if right else (),
            )


def _removed(config: Config) -> list[str]:
    """runtime/config.py, _reject_removed_config_keys."""
    return [dotted for dotted in sorted(known_keys("DeepSpeed").removed) if config.has(dotted)]


def _deprecated(config: Config) -> list[tuple[str, str]]:
    """(key, its replacement) of fields marked deprecated in the parser's own models."""
    return [each for each in known_keys("DeepSpeed").deprecated.items() if config.has(each[0])]


def _undeprecated(config: Config, dotted: str, replacement: str) -> Changes:
    """The change from a deprecated key to what replaces it; empty where a person has to decide."""
    section, _, key = dotted.rpartition(".")
    if key in ("cpu_offload", "cpu_offload_param"):
        moved = setting(f"{section}.{replacement}", {"device": "cpu"}) if config.on(dotted) else ()
    elif " " in replacement:
        return ()
    else:
        moved = setting(f"{section}.stage3_{replacement}", config.get(dotted))
    return (*removal(dotted), *moved)


_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")


def _quoted(config: Config) -> Iterator[tuple[str, Any, str]]:
    """(key, value without quotes, why) of numbers and booleans in quotes: pydantic sections convert some; other code
    and other readers do not."""
    for dotted, value in flat(config.document.data).items():
        if not isinstance(value, str):
            continue
        if truth(value) is not None:
            yield dotted, truth(value), f'"{value}" is text; every text is true where a reader does not convert it'
        elif _NUMBER.fullmatch(value):
            why = f'"{value}" is text, which does not equal the number that accelerate and the Trainer compare it with'
            yield dotted, int(value) if re.fullmatch(r"[-+]?\d{1,300}", value) else float(value), why


_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_FP16_LIMITS = {
    "fp16.loss_scale": ">= 0",
    "fp16.initial_scale_power": ">= 0 and <= 127",
    "fp16.loss_scale_window": "> 0",
    "fp16.min_loss_scale": "> 0",
}
"""Limits that runtime/precision_config.py checks in code. A loss scale of 2¹²⁸ overflows fp32, so every step would be
skipped."""


def _out_of_range(config: Config) -> Iterator[tuple[str, str]]:
    """(key, limit) of numbers beyond the limits of the parser's own fields."""
    limits = {**known_keys("DeepSpeed").limits, **(_FP16_LIMITS if config.get("fp16.enabled") is not False else {})}
    for dotted, limit in limits.items():
        value = config.number(dotted)
        if value is not None and not all(_within(value, each) for each in limit.split(" and ")):
            yield dotted, limit


def _within(value: float, limit: str) -> bool:
    sign, number = limit.split()
    return bool(_OPERATORS[sign](value, float(number)))


def _unknown(node: Mapping[str, Any], known: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in node.items():
        inner = (*path, str(key))
        if key not in known:
            yield inner
        elif isinstance(value, Mapping) and isinstance(known[key], Mapping):
            yield from _unknown(value, known[key], inner)


table(
    "deepspeed",
    {
        Rule(
            "removed-key",
            "ds",
            "features that DeepSpeed dropped (amp, nebula, elasticity, MiCS, …)",
            "it refuses to start; many tutorials still name them",
        ): (
            Each(
                "error",
                lambda c, dotted: dotted,
                _removed,
                lambda c, dotted: f"removed from DeepSpeed, {known_keys('DeepSpeed').version} refuses to start with it",
                lambda c, dotted: REPLACEMENTS.get(dotted, "remove it"),
                lambda c, dotted: removal(dotted),
            ),
        ),
        Rule(
            "deprecated-key",
            "ds",
            '`cpu_offload`, `bfloat16`, `"zero_optimization": true`, …',
            "read by some readers and not by others",
        ): (
            Each(
                "warning",
                lambda c, old: old[0],
                _deprecated,
                "deprecated",
                lambda c, old: f"use {old[1].replace(' or ', ' and ')}",
                lambda c, old: _undeprecated(c, *old),
            ),
            Case(
                "warning",
                "zero_optimization",
                lambda c: isinstance(c.get("zero_optimization"), bool),
                "a switch instead of a section means stage 1 or 0",
                lambda c: f'write {{"stage": {c.stage}}}',
                lambda c: setting("zero_optimization", {"stage": c.stage}),
            ),
            Case(
                "warning",
                "bfloat16",
                lambda c: c.has("bfloat16"),
                "the former name of bf16; accelerate and the Trainer look for bf16 only",
                "rename it",
                lambda c: (*removal("bfloat16"), *setting("bf16", c.get("bfloat16"))),
            ),
        ),
        Rule(
            "text-value",
            "ds",
            '`"true"`, `"8"` in quotes',
            "true whatever it says; unequal to the number it is compared with",
        ): (
            Each(
                "error",
                lambda c, quoted: quoted[0],
                _quoted,
                lambda c, quoted: quoted[2],
                lambda c, quoted: f"write {str(quoted[1]).lower()}",
                lambda c, quoted: setting(quoted[0], quoted[1]),
            ),
        ),
        Rule("value-range", "ds", "sizes and loss-scale powers out of range", "refused, or no step passes"): (
            Each(
                "error",
                lambda c, beyond: beyond[0],
                _out_of_range,
                lambda c, beyond: f"{c.number(beyond[0]):g} is out of range: it must be {beyond[1]}",
                lambda c, beyond: f"write a number {beyond[1]}",
            ),
        ),
    },
)
