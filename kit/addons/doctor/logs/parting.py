"""The call at which the ranks parted, from the flight records of all: some never made it, or made another one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from kit.addons.doctor.logs import waits
from kit.addons.doctor.logs.across_ranks import IN_ONE_ORDER
from kit.addons.doctor.logs.cause import Cause
from kit.addons.doctor.logs.flight_recorder import Call, Records
from kit.addons.doctor.logs.patterns import PATTERNS

_created = attrgetter("created_ns")


@dataclass(frozen=True)
class Parting:
    """A call that some ranks of its group never made, or made with other arguments."""

    call: Call
    came: tuple[int, ...]
    """Ranks that made it."""
    missing: tuple[int, ...] = ()
    """Ranks whose last collective of the group is the earliest."""
    differ: Sequence[Call] = ()
    """What other ranks called instead."""

    @property
    def said(self) -> str:
        """What happened there."""
        if self.differ:
            return f"at {self.call.words}, " + "; ".join(f"rank {c.rank} called {c.signature}" for c in self.differ)
        return f"rank {', '.join(map(str, self.missing))} did not come to {self.call.words}"


def parted(found: Records) -> list[Cause]:
    """The earliest parting; empty if the records agree."""
    between_two = waits.of_records(found)
    blocked = waits.unanswered(between_two)
    if ring := waits.each_other(blocked):
        parting = Parting(min(ring, key=_created), tuple(wait.rank for wait in ring))
        each = [
            f"rank {c.rank} in {c.kind} number {c.number} {'from' if c.kind == 'recv' else 'to'} rank {c.peer}, "
            f"sizes {c.sizes}"
            for c in ring
        ]
        cause = _cause(parting, len(found))
        meaning = f"ranks {', '.join(map(str, cause.ranks))} wait for each other: {'; '.join(each)}"
        return [replace(cause, meaning=meaning, fix=IN_ONE_ORDER)]
    away = [
        Parting(wait, (wait.rank,), (wait.peer or 0,))
        for wait in blocked.values()
        if wait.peer in found and wait.peer not in between_two
    ]
    partings = _of_groups(found) or away
    return [_cause(min(partings, key=lambda each: each.call.created_ns), len(found))] if partings else []


def _cause(parting: Parting, records: int) -> Cause:
    name = "mismatched-collectives" if parting.differ else "collective-timeout"
    pattern = next(pattern for pattern in PATTERNS if pattern.cause == name)
    return Cause(
        cause=name,
        meaning=f"{pattern.meaning}: {parting.said}",
        fix=pattern.fix,
        ranks=tuple(call.rank for call in parting.differ) or parting.came,
        place=parting.call.file,
        evidence=f"flight record: {records} ranks",
        weight=pattern.weight,
    )


def _of_groups(found: Records) -> list[Parting]:
    """The parting of each group. Its members are those in the records' own lists, or else the ranks that called a
    collective of the group."""
    calls: dict[str, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    members: dict[str, set[int]] = defaultdict(set)
    for rank, record in found.items():
        for call in record.calls:
            if not call.is_p2p:
                calls[call.group][rank][call.number] = call
                members[call.group].add(rank)
        for name, ranks in record.groups.items():
            members[name] |= set(ranks) & set(found)
    if "0" in members:
        members["0"] |= set(found)  # the default group
    return [p for group in sorted(calls) if (p := _parted(calls[group], members[group])) is not None]


def _parted(calls: Mapping[int, Mapping[int, Call]], members: set[int]) -> Parting | None:
    """The first collective of a group that is not the same on all of its ranks, or that some did not reach. ``calls``:
    rank → number of a collective → the collective."""

    def at(number: int) -> list[Call]:
        return [calls[rank][number] for rank in sorted(calls) if number in calls[rank]]

    last = {rank: max(calls.get(rank, {}), default=0) for rank in members}
    first = min(last.values())
    oldest = min(map(min, calls.values()), default=1)  # a ring buffer forgets, each rank its own
    for number in range(oldest, first + 1):
        counts = Counter(call.signature for call in at(number))
        usual = max(counts, key=lambda signature: counts[signature], default="")
        if differ := [call for call in at(number) if call.signature != usual]:
            came = tuple(call.rank for call in at(number) if call.signature == usual)
            return Parting(_earliest(at(number), came[0]), came, differ=differ)
    if not (here := at(first + 1)):
        return None
    missing = tuple(sorted(rank for rank in members if last[rank] == first))
    return Parting(_earliest(here, here[0].rank), tuple(sorted(members.difference(missing))), missing)


def _earliest(here: Sequence[Call], rank: int) -> Call:
    """The call of a rank, at the time when the first of all ranks made it."""
    own = next(call for call in here if call.rank == rank)
    return replace(own, created_ns=min(map(_created, here)))
