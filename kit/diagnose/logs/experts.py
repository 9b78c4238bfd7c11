"""Experts that get no tokens, or far too many, by the loads in ``metrics.jsonl``."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kit.diagnose.logs.cause import Cause
from kit.diagnose.logs.reading import LINE_BYTES
from kit.diagnose.logs.two_runs import metrics_files

_LAST = 20
"""Steps at the end that have to agree; fewer are no finding, for a router is uneven when it starts."""
HOT = 3.0
"""Times the mean load; balanced runs stay below 2 (docs/training.md)."""
_FIX = (
    "set job.balancing of the recipe, which pretraining plans have from the model's family; where it is set, raise "
    "moe_aux_loss_coeff, or moe_router_bias_update_rate of routers with sigmoid scores, or lower the learning rate"
)


def unbalanced_experts(paths: Iterable[Path]) -> list[Cause]:
    """Causes of each ``metrics.jsonl`` among the logs, in the directories named or beside the logs."""
    return [cause for path in metrics_files(paths) for cause in _of(path)]


def _of(path: Path) -> Iterator[Cause]:
    last: deque[tuple[int, str, dict[str, Any]]] = deque(maxlen=_LAST)
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES), b""), 1):
            if b'"expert_load_max": ' in line:
                try:
                    row = json.loads(line)
                    values = {name: float(row[name]) for name in ("step", "expert_load_max", "dead_experts")}
                except (ValueError, LookupError, TypeError, RecursionError):
                    continue
                last.append((number, line.decode(errors="replace").strip(), values))
    if len(last) < _LAST:
        return
    number, evidence, values = last[-1]
    rows = [row for _, _, row in last]
    dead, load = min(row["dead_experts"] for row in rows), statistics.median(row["expert_load_max"] for row in rows)
    found = []
    if dead > 0:
        found.append(("dead-experts", f"{dead:.0f} or more experts got no token in any of the last {_LAST} steps"))
    if load > HOT:
        found.append(("hot-expert", f"the fullest expert had {load:.1f} times the mean load in the last {_LAST} steps"))
    for cause, meaning in found:
        yield Cause(
            cause=cause,
            meaning=meaning,
            fix=_FIX,
            ranks=(),
            place=f"{path}:{number}",
            evidence=evidence,
            weight=1,
            step=int(values["step"]),
        )
