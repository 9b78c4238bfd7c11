"""Diagnosis of the logs of all ranks: the root cause, the rank that failed first, and the fix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kit.addons.doctor.logs import flight_recorder, parting, waits
from kit.addons.doctor.logs.across_ranks import refined
from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.log_lines import Line, log_files
from kit.addons.doctor.logs.metrics import metrics_files, of_metrics
from kit.addons.doctor.logs.predicted import beside_plan
from kit.addons.doctor.logs.scan import Scan
from kit.addons.doctor.logs.tracebacks import LAUNCHER_ERRORS, Failed, Traceback
from kit.errors import SpecError
from kit.planner.plan import Plan

VICTIMS = (
    *("DistBackendError", "DistNetworkError", "DistStoreError", "KeyboardInterrupt"),
    *("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError"),
)
"""Exceptions of ranks that waited for a failed rank, or that the launcher stopped."""


def diagnose(paths: Iterable[Path], plan: Plan | None = None) -> tuple[Cause, ...]:
    """Reads the logs and flight records (files or directories) of one job; the root cause comes first.

    ``plan``: adds the predicted memory to out-of-memory causes. Raises ``SpecError``.
    """
    paths = list(paths)
    recorded = flight_recorder.records(paths)
    logs = list(log_files(path for path in paths if flight_recorder.rank_of(path) is None))
    metrics = metrics_files(paths)
    if not (logs or metrics or recorded):
        raise SpecError(
            f"{', '.join(map(str, paths))}: no log (.log, .txt, .out or .err), no metrics.jsonl and no flight record "
            f"there; name the files that the launcher wrote"
        )
    scan = Scan()
    for path in logs:
        scan.read(path)
    seen = [cause for path in metrics for cause in of_metrics(path)]
    told, framed = parting.parted(recorded), _with_frames(scan)
    fixes = {cause.cause: cause.fix for cause in told}
    lines = [replace(cause, fix=fixes.get(cause.cause, cause.fix)) for cause in framed]
    causes = _merged([*seen, *told, *lines, *scan.curves.causes()])
    first = scan.first_rank
    causes = sorted(
        [*causes, *_exceptions(scan)],
        key=lambda cause: (
            -cause.weight,
            cause.cause == "hung",  # after the time-out of a collective, which says more
            first is not None and first not in cause.ranks,
        ),
    )
    calls = {**flight_recorder.last_calls(recorded), **scan.calls, **waits.in_logs(framed, scan.calls)}
    found = refined([*_failed(scan, causes), *causes], scan, calls)
    return found if plan is None else tuple(beside_plan(cause, plan) for cause in found)


def _exceptions(scan: Scan) -> Iterator[Cause]:
    """Exceptions that match no pattern; the rank that failed first, by the launcher's report, comes first."""
    first = scan.first_rank
    named = {(cause.place, cause.ranks) for cause in scan.causes}
    groups: dict[tuple[str, str], list[tuple[Traceback, Line]]] = defaultdict(list)
    for raised, line in scan.exceptions:
        if raised.name not in LAUNCHER_ERRORS and _spot(line) not in named:
            groups[raised.type, raised.frames].append((raised, line))
    for group in groups.values():
        raised, line = group[0]
        ranks = list(dict.fromkeys(each.rank for _, each in group if each.rank is not None))
        if not ranks and len(groups) == 1 and first is not None:
            ranks = [first]
        ranks.sort(key=lambda rank: rank != first)
        said = f": {raised.message}" if raised.message else ""
        yield Cause(
            cause="exception",
            meaning=f"{raised.name}{said}",
            fix=f"look at {raised.own or raised.raised}; other ranks' errors follow from it",
            ranks=tuple(ranks),
            place=line.place,
            evidence=line.text,
            weight=1 if raised.name in VICTIMS else 3,
            frames=raised.frames,
        )


def _with_frames(scan: Scan) -> list[Cause]:
    """Causes, with the frames of the traceback that ends at a cause's line."""
    frames = {_spot(line): raised.frames for raised, line in scan.exceptions}
    return [replace(cause, frames=frames.get((cause.place, cause.ranks))) for cause in scan.causes]


def _spot(line: Line) -> tuple[str, tuple[int, ...]]:
    """Key of a line: its place and its rank, since torchrun's log files of all ranks have the same name."""
    return line.place, () if line.rank is None else (line.rank,)


def _failed(scan: Scan, causes: Sequence[Cause]) -> list[Cause]:
    """The launcher's report of a failed process, if no other cause is known."""
    if any(cause.weight > 1 for cause in causes) or not (scan.failed or scan.exceptions):
        return []
    if scan.first_failed is None:
        raised, line = scan.exceptions[0]
        if any(cause.cause == "exception" for cause in causes):
            return []
        failed = Failed(None, f"{raised.name}: {raised.message}")
    else:
        failed, line = scan.first_failed
    return [
        Cause(
            cause="worker-failed",
            meaning=f"a process ended first with {failed.how}, and these logs do not say why",
            fix="read the log of that rank (torchrun --log-dir DIR --redirects 3 keeps one a rank); decorate main() "
            "with torch.distributed.elastic.multiprocessing.errors.record",
            ranks=() if failed.rank is None else (failed.rank,),
            place=line.place,
            evidence=line.text.strip()[:1000],
            weight=2,
        )
    ]


def _merged(causes: Sequence[Cause]) -> list[Cause]:
    """Merges causes of several lines that need the same act into one, with all ranks and GPUs and the first line."""
    groups: dict[tuple[str, str], list[Cause]] = defaultdict(list)
    for cause in causes:
        groups[cause.cause, cause.fix].append(cause)
    merged = [
        replace(
            group[0],
            ranks=tuple(sorted({rank for cause in group for rank in cause.ranks})),
            gpus=tuple(dict.fromkeys(gpu for cause in group for gpu in cause.gpus)),
            phase=" and ".join(dict.fromkeys(cause.phase for cause in group if cause.phase)) or None,
            step=min((cause.step for cause in group if cause.step is not None), default=None),
        )
        for group in groups.values()
    ]
    return sorted(merged, key=lambda cause: -cause.weight)
