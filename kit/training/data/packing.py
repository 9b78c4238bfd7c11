"""Several short rows in one sequence, without leaving much of it empty."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def packs(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of each pack, at most ``capacity`` tokens together. Depends on the arguments alone: all ranks agree.

    Best fit, longest first: at most 11/9 of the least possible number of packs, and a few more (Johnson, Demers,
    Ullman, Garey & Graham, SIAM J. Comput. 3(4), 1974). Packs are in the order of their first, longest row; rows of one
    length keep the order of the file. Raises ValueError for a row longer than the capacity.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if longest_first and lengths[longest_first[0]] > capacity:
        raise ValueError(f"a row of {lengths[longest_first[0]]} tokens for packs of {capacity}")
    found: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, ascending
    for row in longest_first:
        at = bisect_left(rooms, lengths[row])
        if at == len(rooms):
            pack, room = len(found), capacity
            found.append([])
        else:
            room = rooms[at]
            pack = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        found[pack].append(row)
        left = room - lengths[row]
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(pack)
    return found
