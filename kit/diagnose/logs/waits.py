"""Calls in which ranks wait: in torch's words in a log, and sends and receives of flight records, where pipeline ranks
may wait for each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kit.diagnose.logs.cause import Cause

CALL = re.compile(
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+)|"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: (?P<completed>\d+)"
)
"""ProcessGroupNCCL.cpp: the call that timed out, or the numbers of a rank's calls."""
_GLOO = re.compile(r"for (recv|send) operation")
_C10D = re.compile(r"distributed_c10d\.py:\d+ in (\w+)")
_PEERS = re.compile(r"(?P<call>send|recv) (?P<rank>\d+)(?:->|<-)(?P<peer>\d+)")
Records = Mapping[int, tuple[str, Mapping[str, Any]]]


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
    number: int
    sizes: str
    created_ns: int

    def __str__(self) -> str:
        way = "from" if self.call == "recv" else "to"
        return f"rank {self.rank} in {self.call} number {self.number} {way} rank {self.peer}, sizes {self.sizes}"


def of_records(found: Records) -> dict[int, Wait]:
    """Rank → its oldest send or receive that did not end."""
    waits: dict[int, Wait] = {}
    for rank, (_, data) in found.items():
        for entry in data["entries"]:
            match = _PEERS.search(str(entry["profiling_name"]))
            if not match or entry.get("state") == "completed" or entry.get("retired"):
                continue
            config = data.get("pg_config", {}).get(str(entry["process_group"][0]), {})
            ranks = [int(word) for word in re.findall(r"\d+", str(config.get("ranks", "")))]
            peer = int(match["peer"])
            wait = Wait(
                rank=rank,
                call=match["call"],
                peer=ranks[peer] if peer < len(ranks) else peer,
                number=int(entry["p2p_seq_id"]),
                sizes=str(entry["input_sizes"] or entry.get("output_sizes")),
                created_ns=int(entry["time_created_ns"]),
            )
            if rank not in waits or wait.created_ns < waits[rank].created_ns:
                waits[rank] = wait
    return waits


def each_other(waits: Mapping[int, Wait]) -> tuple[Wait, ...]:
    """The waits of ranks each of which waits for the next, and the last for the first; empty if there is no such ring.
    A send and the receive for which it was made are none."""
    for start in sorted(waits):
        path = [start]
        while (peer := waits[path[-1]].peer) in waits and peer not in path:
            path.append(peer)
        ring = path[path.index(peer) :] if peer in path else []
        pair = {waits[rank].call for rank in ring}
        if ring and not (len(ring) == 2 and len(pair) == 2):
            return tuple(waits[rank] for rank in sorted(ring))
    return ()


def last_calls(found: Records) -> dict[int, str]:
    """Rank → the last call in its flight record."""
    last = {rank: max(data["entries"], key=_created, default=None) for rank, (_, data) in found.items()}
    return {
        rank: f"{str(entry['profiling_name']).split(':')[-1]} number "
        f"{entry['p2p_seq_id' if entry.get('is_p2p') else 'collective_seq_id']} of group {entry['process_group'][0]}"
        for rank, entry in last.items()
        if entry is not None
    }


def _created(entry: Mapping[str, Any]) -> int:
    return int(entry["time_created_ns"])
