"""Calls in which ranks wait: in torch's words in a log, and sends and receives of flight records, where pipeline ranks
may wait for each other."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kit.addons.doctor.logs.cause import Cause

CALL = re.compile(
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+)|"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: (?P<completed>\d+)"
)
"""ProcessGroupNCCL.cpp: the call that timed out, or the numbers of a rank's calls."""
_GLOO = re.compile(r"for (recv|send) operation")
_C10D = re.compile(r"distributed_c10d\.py:\d+ in (\w+)")
_PEERS = re.compile(r"(?P<call>send|recv) (?P<rank>\d+)(?:->|<-)(?P<peer>\d+)")
Records = Mapping[int, tuple[str, Mapping[str, Any]]]
"""Rank → (file, record)."""


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


@dataclass(frozen=True)
class Wait:
    """A send or receive that did not end."""

    rank: int
    call: str
    peer: int
    group: str
    number: int
    sizes: str
    created_ns: int

    def __str__(self) -> str:
        way = "from" if self.call == "recv" else "to"
        return f"rank {self.rank} in {self.call} number {self.number} {way} rank {self.peer}, sizes {self.sizes}"


def of_records(found: Records) -> dict[int, tuple[Wait, ...]]:
    """Rank → its oldest send or receive that did not end, with the others of the same batch.

    The calls of a batch (``batch_isend_irecv``) have the same numbers, and their state stays "scheduled": an entry
    "coalesced" of these numbers, the last of the batch, has the state of all.
    """
    waits: dict[int, tuple[Wait, ...]] = {}
    for rank, (_, data) in found.items():
        entries = sorted(data["entries"], key=created)
        ended = {_batch(entry) for entry in entries if _ended(entry) and entry["profiling_name"].endswith("coalesced")}
        left: dict[tuple[str, int, int], list[Wait]] = defaultdict(list)
        for entry in entries:
            match = _PEERS.search(str(entry["profiling_name"]))
            if match and not _ended(entry) and _batch(entry) not in ended:
                left[_batch(entry)].append(_wait(rank, match, entry, data.get("pg_config", {})))
        if left:
            waits[rank] = tuple(next(iter(left.values())))
    return waits


def _wait(rank: int, match: re.Match[str], entry: Mapping[str, Any], groups: Mapping[str, Any]) -> Wait:
    listed = str(groups.get(str(entry["process_group"][0]), {}).get("ranks", ""))
    ranks = [int(word) for word in re.findall(r"\d+", listed)]
    peer = int(match["peer"])  # within the group
    return Wait(
        rank=rank,
        call=match["call"],
        peer=ranks[peer] if peer < len(ranks) else peer,
        group=f"{entry['process_group'][0]} ({entry['process_group'][1]})",
        number=_batch(entry)[1],
        sizes=str(entry["input_sizes"] or entry.get("output_sizes")),
        created_ns=created(entry),
    )


def _batch(entry: Mapping[str, Any]) -> tuple[str, int, int]:
    p2p, collective = entry.get("p2p_seq_id") or 0, entry.get("collective_seq_id") or 0
    return str(entry["process_group"][0]), int(p2p), int(collective)


def _ended(entry: Mapping[str, Any]) -> bool:
    return entry.get("state") == "completed" or bool(entry.get("retired"))


def unanswered(waits: Mapping[int, Sequence[Wait]]) -> dict[int, Wait]:
    """Rank → its wait, if its peer does not wait in the other half of it. A send whose receiver is there waits for
    nobody's order, but for the network."""

    def answered(wait: Wait) -> bool:
        return any(other.peer == wait.rank and other.call != wait.call for other in waits.get(wait.peer, ()))

    return {rank: left[0] for rank, own in waits.items() if (left := [wait for wait in own if not answered(wait)])}


def each_other(blocked: Mapping[int, Wait]) -> tuple[Wait, ...]:
    """The waits of ranks each of which waits for the next, and the last for the first; empty if there is no such
    ring."""
    for start in sorted(blocked):
        path = [start]
        while (peer := blocked[path[-1]].peer) in blocked and peer not in path:
            path.append(peer)
        if peer in path:
            return tuple(blocked[rank] for rank in sorted(path[path.index(peer) :]))
    return ()


def last_calls(found: Records) -> dict[int, str]:
    """Rank → the last call in its flight record."""
    last = {rank: max(data["entries"], key=created, default=None) for rank, (_, data) in found.items()}
    return {
        rank: f"{name_of(entry)} number {_batch(entry)[1 if entry.get('is_p2p') else 2]} "
        f"of group {entry['process_group'][0]}"
        for rank, entry in last.items()
        if entry is not None
    }


def name_of(entry: Mapping[str, Any]) -> str:
    """``nccl:all_reduce`` is all_reduce."""
    return str(entry["profiling_name"]).split(":")[-1]


def created(entry: Mapping[str, Any]) -> int:
    """Nanoseconds of the clock; 0 where the record has none."""
    return int(entry.get("time_created_ns") or 0)
