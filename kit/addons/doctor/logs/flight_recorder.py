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
class MissingRank:
    """A collective that some ranks of its group never called, or called with other arguments."""

    group: str
    number: int
    """Collectives of a group are counted from 1."""
    name: str
    sizes: str
    came: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks whose last collective of the group is the earliest."""
    differ: tuple[tuple[int, str], ...]
    """(rank, the collective that it called instead)."""
    file: str
    each_other: tuple[waits.Wait, ...] = ()
    """Sends or receives of ranks that wait for each other."""

    @property
    def what(self) -> str:
        """Text for people."""
        return f"{self.name} number {self.number} of group {self.group}, sizes {self.sizes}"


class _Plain(pickle.Unpickler):
    """Refuses every class: a record has only dicts, lists, numbers and text."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a flight record holds no {module}.{name}")


def is_record(path: Path) -> bool:
    """Whether a file is a record, by its name, which ends in the rank, and its first byte."""
    try:
        with open_regular(path) as stream:
            return bool(_RANK.search(path.name)) and stream.read(1) == _MAGIC
    except (OSError, ValueError):
        return False


def records(paths: Iterable[Path]) -> dict[int, tuple[str, Mapping[str, Any]]]:
    """Rank → (file, record) of every flight record in these files and directories; other files are skipped."""
    found: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_file() or not is_record(file) or file.stat().st_size > LARGEST_BYTES:
                continue
            match = _RANK.search(file.name)
            assert match is not None
            try:
                data = _Plain(io.BytesIO(file.read_bytes())).load()
            except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError):
                continue
            if isinstance(data, dict) and isinstance(data.get("entries"), list):
                found[int(match.group(1))] = (file.name, data)
    return found


def missing_rank(found: Mapping[int, tuple[str, Mapping[str, Any]]]) -> MissingRank | None:
    """The earliest collective at which the ranks diverged; None if the records agree.

    The members of a group are those in the record's own list, or else the ranks that called a collective of the group.
    """
    calls: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    members: dict[str, set[int]] = defaultdict(set)
    between_two = waits.of_records(found)
    blocked = waits.unanswered(between_two)
    if ring := waits.each_other(blocked):
        return _of_wait(min(ring, key=lambda wait: wait.created_ns), tuple(wait.rank for wait in ring), (), found, ring)
    for rank, (_, data) in found.items():
        for entry in data["entries"]:
            if entry.get("is_p2p"):
                continue
            group = str(entry["process_group"][0])
            calls[group][rank][int(entry["collective_seq_id"])] = entry
            members[group].add(rank)
        for name, config in data.get("pg_config", {}).items():
            members[str(name)] |= {int(word) for word in re.findall(r"\d+", str(config.get("ranks", "")))} & set(found)
    if "0" in members:
        members["0"] |= set(found)  # the default group
    parted = [m for group in sorted(calls) if (m := _parted(group, calls[group], members[group], found)) is not None]
    if parted:
        return min(parted, key=_when(calls))
    stayed_away = [wait for wait in blocked.values() if wait.peer in found and wait.peer not in between_two]
    wait = min(stayed_away, key=lambda wait: wait.created_ns, default=None)
    return None if wait is None else _of_wait(wait, (wait.rank,), (wait.peer,), found)


def _of_wait(
    wait: waits.Wait,
    came: tuple[int, ...],
    missing: tuple[int, ...],
    found: waits.Records,
    ring: tuple[waits.Wait, ...] = (),
) -> MissingRank:
    return MissingRank(wait.group, wait.number, wait.call, wait.sizes, came, missing, (), found[wait.rank][0], ring)


def _parted(
    group: str,
    calls: Mapping[int, Mapping[int, Mapping[str, Any]]],
    members: set[int],
    found: Mapping[int, tuple[str, Mapping[str, Any]]],
) -> MissingRank | None:
    last = {rank: max(calls.get(rank, {}), default=0) for rank in members}
    first, furthest = min(last.values()), max(last.values())
    oldest = min(map(min, calls.values()), default=1)  # a ring buffer forgets, each rank its own
    for number in range(oldest, min(first, furthest) + 1):
        here = {rank: _signature(calls[rank][number]) for rank in members if number in calls.get(rank, {})}
        if len(set(here.values())) > 1:
            usual = Counter(here.values()).most_common(1)[0][0]
            differ = tuple(sorted((rank, signature) for rank, signature in here.items() if signature != usual))
            came = tuple(sorted(rank for rank, signature in here.items() if signature == usual))
            return _missing_rank(group, number, calls[came[0]][number], came, (), differ, found)
    if first == furthest:
        return None
    number = first + 1
    came = tuple(sorted(rank for rank in members if last[rank] >= number))
    missing = tuple(sorted(rank for rank in members if last[rank] == first))
    entry = next((calls[rank][number] for rank in came if number in calls[rank]), None)
    return None if entry is None else _missing_rank(group, number, entry, came, missing, (), found)


def _missing_rank(
    group: str,
    number: int,
    entry: Mapping[str, Any],
    came: tuple[int, ...],
    missing: tuple[int, ...],
    differ: tuple[tuple[int, str], ...],
    found: Mapping[int, tuple[str, Mapping[str, Any]]],
) -> MissingRank:
    described = str(entry["process_group"][1])
    name = group if described in ("", "undefined") else f"{group} ({described})"
    call = str(entry["profiling_name"]).split(":")[-1]
    return MissingRank(name, number, call, str(entry["input_sizes"]), came, missing, differ, found[came[0]][0])


def _signature(entry: Mapping[str, Any]) -> str:
    """The parts of a call that must be equal on all ranks. Without a gather's outputs and a scatter's inputs, which may
    exist on one rank only."""
    call = str(entry["profiling_name"]).split(":")[-1]
    return f"{call} of {entry['input_sizes']} {','.join(entry.get('input_dtypes', []))}".strip()


def _when(calls: Mapping[str, Mapping[int, Mapping[int, Mapping[str, Any]]]]) -> Any:
    """Sort key: the time at which the first rank issued the call that others did not."""

    def created(parting: MissingRank) -> int:
        group = parting.group.split(" ")[0]
        times = [own[parting.number]["time_created_ns"] for own in calls[group].values() if parting.number in own]
        return int(min(times, default=0))

    return created
