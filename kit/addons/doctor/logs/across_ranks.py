"""What the logs of all ranks say together about a cause: who was missing, who waits for whom, whether only one rank ran
out of memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.patterns import ALLOCATOR, RESERVED
from kit.addons.doctor.logs.scan import Scan

MUCH_UNALLOCATED_GIB = 2.0
"""Reserved but unallocated GiB above which fragmentation is reported."""
IN_ONE_ORDER = (
    "each waits for what the other would do later: give both sends and receives of two stages to batch_isend_irecv at "
    "once, or let one of them send first and the other receive first; the same order of calls on every rank"
)
IN_ONE_CALL = (
    "if these are the logs of all ranks, none stayed away: look for Xid and link errors in dmesg of every host, test "
    "the network with kit doctor --hosts HOSTFILE --bandwidth, and compare sizes with TORCH_DISTRIBUTED_DEBUG=DETAIL"
)
MOST_CALLS = 8
"""Most ranks whose calls are listed."""
_BETWEEN_TWO = re.compile(r"(?i)(?:i?send|i?recv|coalesced|batch_isend_irecv)\b")
_OF_A_BATCH = ("", "forward", "backward", "evaluation")
"""Phases in which memory follows the batch."""


def refined(causes: Sequence[Cause], scan: Scan, calls: Mapping[int, str]) -> tuple[Cause, ...]:
    """The causes with these facts. ``calls``: rank → the call in which it waits, or its last one."""
    crashed = next((cause.ranks for cause in causes if cause.cause == "crashed"), ())
    hung = {rank for cause in causes if cause.cause == "hung" for rank in cause.ranks}
    return tuple(_refined(cause, causes, scan, calls, hung, crashed) for cause in causes)


def _refined(
    cause: Cause,
    causes: Sequence[Cause],
    scan: Scan,
    calls: Mapping[int, str],
    hung: Set[int],
    crashed: tuple[int, ...],
) -> Cause:
    if cause.cause == "collective-timeout" and cause.ranks:
        meaning, fix = _who_waits(cause, scan, calls, hung)
        return replace(cause, meaning=meaning, fix=fix)
    if cause.cause == "hung" and cause.ranks and "watchdog" in cause.evidence.lower() + cause.meaning:
        known = ", ".join(f"rank {rank} in {calls[rank]}" for rank in cause.ranks[:MOST_CALLS] if rank in calls)
        return replace(cause, meaning=f"{cause.meaning}; last known call: {known or 'none in these logs'}")
    if cause.cause.endswith("out-of-memory"):
        return _out_of_memory(cause, causes, scan)
    # A library that aborts prints no rank; the launcher reports the rank of the process.
    return replace(cause, ranks=cause.ranks or crashed) if cause.cause == "mismatched-collectives" else cause


def _who_waits(cause: Cause, scan: Scan, calls: Mapping[int, str], hung: Set[int]) -> tuple[str, str]:
    """Meaning and fix of a time-out: the rank that stayed away, or else the calls of the ranks that all wait."""
    told = "did not come" in cause.meaning or "each other" in cause.meaning  # by flight records, which know more
    missing = sorted(scan.ranks - set(cause.ranks))
    waiting = [(rank, calls[rank]) for rank in cause.ranks if rank in calls]
    same = {call for _, call in waiting}
    if missing:
        names = ", ".join(map(str, missing))
        if downloading := [scan.downloading[rank] for rank in (None, *missing) if rank in scan.downloading]:
            fix = "download to shared storage before the job starts; no node needs the hub then"
            return f"the others waited while rank {names} downloaded ({downloading[-1].place})", fix
        to = f" to {next(iter(same))}" if len(same) == 1 else ""
        did = "hangs, and did not end its part" if set(missing) <= hung else f"did not come{to}"
        return (cause.meaning if told else f"{cause.meaning}: rank {names} {did}"), cause.fix
    if told or len(waiting) < 2:
        return cause.meaning, cause.fix
    if len(same) == 1 and not _BETWEEN_TWO.match(waiting[0][1]):
        return f"all ranks in these logs came to {waiting[0][1]}, and it did not end", IN_ONE_CALL
    listed = ", ".join(f"rank {rank} in {call}" for rank, call in waiting[:MOST_CALLS])
    more = f" and {len(waiting) - MOST_CALLS} more" if len(waiting) > MOST_CALLS else ""
    return f"all ranks in these logs wait, for each other: {listed}{more}", IN_ONE_ORDER


def _out_of_memory(cause: Cause, causes: Sequence[Cause], scan: Scan) -> Cause:
    """Whether one rank alone ran out of memory, and whether its memory was in pieces."""
    meaning, fix = cause.meaning, cause.fix
    ranks = {rank for other in causes if other.cause == cause.cause for rank in other.ranks}
    if len(ranks) == 1 and len(scan.ranks) > 1:
        batch = (cause.phase or "").split(" and ")[0] in _OF_A_BATCH
        why = "its batch was longer" if batch else "it holds or gathers more than they do"
        meaning = f"{meaning}, and no other: {why}, or another process shares its memory"
        fix = f"bucket by length and pad alike; else {fix}" if batch else fix
    held = RESERVED.search(cause.evidence) if cause.cause == "gpu-out-of-memory" else None
    if held and _gib(held[2]) >= min(_gib(held[1]), MUCH_UNALLOCATED_GIB):
        meaning = f"{meaning}; {held[2]} were reserved but unallocated, in pieces too small for the {held[1]} asked"
        fix = f"set {ALLOCATOR}, which joins such pieces; else {fix}"
    return replace(cause, meaning=meaning, fix=fix)


def _gib(said: str) -> float:
    number, unit = said.split()
    return float(number) / {"KiB": 1 << 20, "MiB": 1 << 10, "GiB": 1}[unit]
