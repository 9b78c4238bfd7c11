"""Calls in which ranks wait: in torch's words in a log, and sends and receives of flight records, where pipeline ranks
may wait for each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.flight_recorder import Call, Records

CALL = re.compile(
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+)|"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: (?P<completed>\d+)"
)
"""ProcessGroupNCCL.cpp: the call that timed out, or the numbers of a rank's calls."""
_GLOO = re.compile(r"for (recv|send) operation")
_C10D = re.compile(r"distributed_c10d\.py:\d+ in (\w+)")


def named(match: re.Match[str]) -> str:
    """A match of ``CALL`` for people."""
    if match["op"]:
        return f"{match['op']} number {match['number']}"
    return f"call {match['enqueued']}, of which {match['completed']} were completed"


def in_logs(causes: Iterable[Cause], calls: Mapping[int, str]) -> dict[int, str]:
    """Rank → the call in which it timed out: by NCCL's words (``calls``), or else by the frames of its traceback."""
    found: dict[int, str] = {}
    for cause in causes:
        for rank in cause.ranks if cause.cause == "collective-timeout" else ():
            own, _, raised = (cause.frames or "").partition(", raised in ")
            gloo, c10d = _GLOO.search(cause.evidence), _C10D.search(raised or own)
            call = c10d[1] if c10d else gloo[1] if gloo else "a call"
            found.setdefault(rank, calls.get(rank) or (f"{call} at {own}" if own else call))
    return found


def of_records(found: Records) -> dict[int, list[Call]]:
    """Rank → its oldest send or receive that did not end, with the others of the same batch.

    The calls of a batch (``batch_isend_irecv``) have the same numbers, and their state stays "scheduled": an entry
    "coalesced" of these numbers, the last of the batch, has the state of all.
    """
    waits: dict[int, list[Call]] = {}
    for rank, record in found.items():
        ended = {call.batch for call in record.calls if call.ended and call.name.endswith("coalesced")}
        left = [call for call in record.calls if call.peer is not None and not call.ended and call.batch not in ended]
        if left := sorted(left, key=lambda call: call.created_ns):
            waits[rank] = [call for call in left if call.batch == left[0].batch]
    return waits


def unanswered(waits: Mapping[int, Sequence[Call]]) -> dict[int, Call]:
    """Rank → its wait, if its peer does not wait in the other half of it. A send whose receiver is there waits for
    nobody's order, but for the network."""

    def answered(wait: Call) -> bool:
        return any(other.peer == wait.rank and other.kind != wait.kind for other in waits.get(wait.peer or 0, ()))

    return {rank: left[0] for rank, own in waits.items() if (left := [wait for wait in own if not answered(wait)])}


def each_other(blocked: Mapping[int, Call]) -> tuple[Call, ...]:
    """The waits of ranks each of which waits for the next, and the last for the first; empty if there is no such
    ring."""
    for start in sorted(blocked):
        path = [start]
        while (peer := blocked[path[-1]].peer) is not None and peer in blocked and peer not in path:
            path.append(peer)
        if peer in path:
            return tuple(blocked[rank] for rank in sorted(path[path.index(peer) :]))
    return ()
