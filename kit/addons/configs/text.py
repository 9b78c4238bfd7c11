"""The text of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kit.addons.configs.answer import Answer
from kit.addons.configs.entries import word
from kit.addons.configs.variants import Variant
from kit.cost.memory.offload import HOST_SHARE
from kit.report.summary import labelled, summary, wrapped
from kit.report.view import by_component, view_of
from kit.units import human_seconds

_SAID = {"most": "needs at most this", "least": "needs at least this", None: ""}


def text_of(answer: Answer, then: tuple[str, ...], width: int, style: Callable[[str], str]) -> str:
    """``kit plan``'s lines of the file as it is, then what is said of a file alone."""
    lines = [f"{answer.path}: {answer.asked.table.program}'s, as it is", ""]
    lines += summary(view_of(answer.plan), (), width, style).splitlines()
    lines += wrapped(_rows(answer), width, style)
    return "\n".join([*lines, *labelled("next", then, style)])


def _rows(answer: Answer) -> Iterator[tuple[str, str]]:
    said, help_ = _SAID[answer.bound], "other GPUs, shorter rows"
    if answer.now.host_fits is False:
        room = HOST_SHARE * (answer.plan.cluster.host_ram_gib or 0.0)
        held = answer.plan.predicted.host_ram_gib_per_node
        said = f"needs {held:,.0f} GiB of every node's own memory, of which {room:,.0f} are usable"
        help_ = "nodes with more memory, more of them"
    yield "verdict", f"{answer.verdict}{f': it {said}' if said else ''}"
    fullest = max(answer.plan.predicted.memory, key=lambda stage: stage.peak_gib)
    parts = by_component([fullest])
    yield "GiB", " · ".join(f"{name} {sizes[0]:.1f}" for name, sizes in parts.items())
    if answer.worst_case:
        length = answer.plan.job.seq_length
        yield "rows", f"worst case: every row is {length:,} tokens long; --row-tokens N for typical ones"
    for gap in answer.now.described.gaps:
        where = f"line {gap.line}, " if gap.line else ""
        yield "left out", f"{where}{gap.key}: {gap.why} ({_SAID[gap.bound]})"
    for finding in answer.findings:
        yield "found", str(finding)
    if answer.nearest is not None:
        yield "fits with", _change(answer, answer.nearest)
    elif not answer.now.fits:
        yield "fits with", f"nothing that {answer.asked.table.program} has: {help_}, or another method"
    if answer.fastest is not None and answer.fastest != answer.nearest:
        yield "fastest", _change(answer, answer.fastest)


def _change(answer: Answer, found: Variant) -> str:
    keys = ", ".join(f"{key}={word(value)}" for key, value in found.values.items())
    host = "" if found.host_fits is not None else ", where a node has the host memory"
    ratio = found.step_s / answer.now.step_s - 1
    return f"{keys}: {found.peak_gib:.1f} GiB, {human_seconds(found.step_s)} a step ({ratio:+.0%}){host}"
