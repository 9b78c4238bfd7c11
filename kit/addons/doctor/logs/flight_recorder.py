"""torch's flight recorder: the last collectives of every rank, as it dumps them when one times out (``flight/rank_N``).

A record is a pickle of plain values; it is read by an unpickler that knows no classes, because a log may come from
anywhere. Format 2.x, torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (torch 2.13).
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kit.addons.doctor.logs import waits
from kit.specs.text_files import open_regular

_RANK = re.compile(r"(\d+)$")
_MAGIC = b"\x80"
LARGEST_BYTES = 1 << 28


@dataclass(frozen=True)
class Parting:
    """A call that some ranks of its group never made, or made with other arguments."""

    what: str
    """The call: its name, its number in the group (from 1), the group, the sizes."""
    came: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks whose last collective of the group is the earliest."""
    file: str
    created_ns: int
    """When the first rank made it."""
    differ: tuple[tuple[int, str], ...] = ()
    """(rank, the collective that it called instead)."""
    each_other: tuple[waits.Wait, ...] = ()
    """Sends or receives of ranks that wait for each other."""


class _Plain(pickle.Unpickler):
    """Refuses every class: a record has only dicts, lists, numbers and text."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a flight record holds no {module}.{name}")


def rank_of(path: Path) -> int | None:
    """The rank of a record, by the end of its name; None if its name or its first byte says that it is none."""
    rank = _RANK.search(path.name)
    try:
        with open_regular(path) as stream:
            return int(rank[1]) if rank and stream.read(1) == _MAGIC else None
    except (OSError, ValueError):
        return None


def records(paths: Iterable[Path]) -> waits.Records:
    """Rank → (file, record) of every flight record in these files and directories; other files are skipped."""
    found: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for file in (file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])):
        rank = rank_of(file)
        if rank is None or file.stat().st_size > LARGEST_BYTES:
            continue
        try:
            data = _Plain(io.BytesIO(file.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError):
            continue
        if isinstance(data, dict) and isinstance(data.get("entries"), list):
            found[rank] = (file.name, data)
    return found


def parting(found: waits.Records) -> Parting | None:
    """The earliest collective at which the ranks parted; None if the records agree."""
    between_two = waits.of_records(found)
    blocked = waits.unanswered(between_two)
    if ring := waits.each_other(blocked):
        return _of_wait(min(ring, key=lambda wait: wait.created_ns), found, tuple(wait.rank for wait in ring), (), ring)
    calls, members = _groups(found)
    parted = [p for group in sorted(calls) if (p := _parted(group, calls[group], members[group], found)) is not None]
    if parted:
        return min(parted, key=lambda each: each.created_ns)
    stayed_away = [wait for wait in blocked.values() if wait.peer in found and wait.peer not in between_two]
    wait = min(stayed_away, key=lambda wait: wait.created_ns, default=None)
    return None if wait is None else _of_wait(wait, found, (wait.rank,), (wait.peer,))


Calls = Mapping[int, Mapping[int, Mapping[str, Any]]]
"""Rank → number of a collective → its entry; of one group."""


def _groups(found: waits.Records) -> tuple[Mapping[str, Calls], Mapping[str, set[int]]]:
    """Group → its calls, and its members: those in the record's own list, or else the ranks that called a collective of
    the group."""
    calls: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    members: dict[str, set[int]] = defaultdict(set)
    for rank, (_, data) in found.items():
        for entry in data["entries"]:
            if not entry.get("is_p2p"):
                group = str(entry["process_group"][0])
                calls[group][rank][int(entry["collective_seq_id"])] = entry
                members[group].add(rank)
        for name, config in data.get("pg_config", {}).items():
            members[str(name)] |= {int(word) for word in re.findall(r"\d+", str(config.get("ranks", "")))} & set(found)
    if "0" in members:
        members["0"] |= set(found)  # the default group
    return calls, members


def _of_wait(
    wait: waits.Wait,
    found: waits.Records,
    came: tuple[int, ...],
    missing: tuple[int, ...],
    ring: tuple[waits.Wait, ...] = (),
) -> Parting:
    what = f"{wait.call} number {wait.number} of group {wait.group}, sizes {wait.sizes}"
    return Parting(what, came, missing, found[wait.rank][0], wait.created_ns, each_other=ring)


def _parted(group: str, calls: Calls, members: set[int], found: waits.Records) -> Parting | None:
    """The first collective of a group that is not the same on all of its ranks, or that some did not reach."""

    def at(number: int) -> dict[int, Mapping[str, Any]]:
        return {rank: calls[rank][number] for rank in sorted(calls) if number in calls[rank]}

    last = {rank: max(calls.get(rank, {}), default=0) for rank in members}
    first, furthest = min(last.values()), max(last.values())
    oldest = min(map(min, calls.values()), default=1)  # a ring buffer forgets, each rank its own
    for number in range(oldest, first + 1):
        signatures = {rank: _signature(entry) for rank, entry in at(number).items()}
        if len(set(signatures.values())) > 1:
            usual = Counter(signatures.values()).most_common(1)[0][0]
            differ = tuple((rank, signature) for rank, signature in signatures.items() if signature != usual)
            came = tuple(rank for rank, signature in signatures.items() if signature == usual)
            return _of_call(group, number, at(number), found, came, (), differ)
    if first == furthest or not at(first + 1):
        return None
    came = tuple(sorted(rank for rank in members if last[rank] > first))
    missing = tuple(sorted(rank for rank in members if last[rank] == first))
    return _of_call(group, first + 1, at(first + 1), found, came, missing)


def _of_call(
    group: str,
    number: int,
    here: Mapping[int, Mapping[str, Any]],
    found: waits.Records,
    came: tuple[int, ...],
    missing: tuple[int, ...],
    differ: tuple[tuple[int, str], ...] = (),
) -> Parting:
    """``here``: rank → its entry of this number, where it did not forget it."""
    entry = next(here[rank] for rank in came if rank in here)
    described = str(entry["process_group"][1])
    name = group if described in ("", "undefined") else f"{group} ({described})"
    what = f"{waits.name_of(entry)} number {number} of group {name}, sizes {entry['input_sizes']}"
    return Parting(what, came, missing, found[came[0]][0], min(map(waits.created, here.values())), differ)


def _signature(entry: Mapping[str, Any]) -> str:
    """The parts of a call that must be equal on all ranks. Without a gather's outputs and a scatter's inputs, which may
    exist on one rank only."""
    return f"{waits.name_of(entry)} of {entry['input_sizes']} {','.join(entry.get('input_dtypes', []))}".strip()
