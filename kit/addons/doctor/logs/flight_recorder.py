"""torch's flight recorder: the last calls of every rank, as it dumps them when one times out (``flight/rank_N``).

A record is a pickle of plain values; it is read by an unpickler that knows no classes, because a log may come from
anywhere. Format 2.x, torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (torch 2.13).
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kit.specs.text_files import open_regular

_RANK = re.compile(r"(\d+)$")
_PEER = re.compile(r"(?:send|recv) \d+(?:->|<-)(?P<peer>\d+)")
_MAGIC = b"\x80"
LARGEST_BYTES = 1 << 28


@dataclass(frozen=True)
class Call:
    """A collective, or a send or receive, in the record of one rank."""

    rank: int
    file: str
    name: str
    """``nccl:all_reduce`` is all_reduce."""
    kind: str
    """The name without the two ranks of a send or receive."""
    group: str
    of_group: str
    """The group, with what it is for, where the record says it."""
    number: int
    """The call's number in its group: of a send or receive among these."""
    batch: tuple[str, int, int]
    """Group, and both numbers: the calls of ``batch_isend_irecv`` have the same."""
    is_p2p: bool
    peer: int | None
    """The other rank of a send or receive, counted over all ranks where the record lists the group's."""
    sizes: str
    signature: str
    """What must be equal on all ranks. Without a gather's outputs and a scatter's inputs, which may exist on one rank
    only."""
    created_ns: int
    """By the clock; 0 where the record has none."""
    ended: bool

    @property
    def words(self) -> str:
        """The call for people."""
        return f"{self.kind} number {self.number} of group {self.of_group}, sizes {self.sizes}"


@dataclass(frozen=True)
class Record:
    """What one rank recorded."""

    groups: Mapping[str, Sequence[int]]
    """Group → its ranks, where the record lists them."""
    calls: Sequence[Call]


Records = Mapping[int, Record]
"""Rank → its record."""


class _Plain(pickle.Unpickler):
    """Refuses every class: a record has only dicts, lists, numbers and text."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a flight record holds no {module}.{name}")


def rank_of(path: Path) -> int | None:
    """The rank of a record, by the end of its name; None if its name or its first byte says that it is none."""
    rank = _RANK.search(path.name)
    with suppress(OSError, ValueError), open_regular(path) as stream:
        return int(rank[1]) if rank and stream.read(1) == _MAGIC else None
    return None


def records(paths: Iterable[Path]) -> Records:
    """Every flight record in these files and directories; other files are skipped."""
    found: dict[int, Record] = {}
    for file in (file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])):
        rank = rank_of(file)
        if rank is not None and file.stat().st_size <= LARGEST_BYTES:
            with suppress(pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError):
                found[rank] = _record(rank, file.name, _Plain(io.BytesIO(file.read_bytes())).load())
    return found


def _record(rank: int, file: str, data: Any) -> Record:
    """Raises TypeError and the like if ``data`` is no record."""
    if not isinstance(data["entries"], list):
        raise TypeError("entries")
    groups = {
        str(name): [int(word) for word in re.findall(r"\d+", str(config.get("ranks", "")))]
        for name, config in data.get("pg_config", {}).items()
    }
    return Record(groups, [_call(rank, file, entry, groups) for entry in data["entries"]])


def _call(rank: int, file: str, entry: Mapping[str, Any], groups: Mapping[str, Sequence[int]]) -> Call:
    group, described = map(str, entry["process_group"])
    name, sizes = str(entry["profiling_name"]).split(":")[-1], entry["input_sizes"]
    p2p, collective = (int(entry.get(key) or 0) for key in ("p2p_seq_id", "collective_seq_id"))
    peer = int(match["peer"]) if (match := _PEER.search(name)) else None  # within the group
    ranks = dict(enumerate(groups.get(group, ())))
    return Call(
        rank=rank,
        file=file,
        name=name,
        kind=name.partition(" ")[0],
        group=group,
        of_group=group if described in ("", "undefined") else f"{group} ({described})",
        number=p2p if entry.get("is_p2p") else collective,
        batch=(group, p2p, collective),
        is_p2p=bool(entry.get("is_p2p")),
        peer=None if peer is None else ranks.get(peer, peer),
        sizes=str(sizes if sizes or peer is None else entry.get("output_sizes")),
        signature=f"{name} of {sizes} {','.join(entry.get('input_dtypes', []))}".strip(),
        created_ns=int(entry.get("time_created_ns") or 0),
        ended=entry.get("state") == "completed" or bool(entry.get("retired")),
    )


def last_calls(found: Records) -> dict[int, str]:
    """Rank → the last call in its flight record."""
    last = {rank: max(record.calls, key=lambda call: call.created_ns, default=None) for rank, record in found.items()}
    return {rank: f"{call.name} number {call.number} of group {call.group}" for rank, call in last.items() if call}
