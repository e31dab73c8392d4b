"""Heaps in arrays of records, for `bml.lab.packets.events`.

The machine code of that module has these functions in it, and is kept for later runs until its own file
changes. After a change here, change that file, too, or delete the folders __pycache__.
"""

from __future__ import annotations

from typing import Any

from bml.lab.flows.compiled import inlined
from bml.lab.packets.world import Records


@inlined
def push(heap: Records, first: int, size: int, key: float, rank: int, item: int) -> None:
    """Add an entry to the heap that lies in heap[first : first + size]."""
    at = size
    heap[first + at].key, heap[first + at].rank, heap[first + at].item = key, rank, item
    while at and _before(heap[first + at], heap[first + (at - 1) // 2]):
        _swap(heap, first + at, first + (at - 1) // 2)
        at = (at - 1) // 2


@inlined
def pop(heap: Records, first: int, size: int) -> int:
    """Take the first item out of the heap in heap[first : first + size]."""
    item = heap[first].item
    _swap(heap, first, first + size - 1)
    at = 0
    while 2 * at + 1 < size - 1:
        child = 2 * at + 1
        if child + 1 < size - 1 and _before(heap[first + child + 1], heap[first + child]):
            child += 1
        if not _before(heap[first + child], heap[first + at]):
            break
        _swap(heap, first + at, first + child)
        at = child
    return item  # type: ignore[no-any-return]


@inlined
def _swap(heap: Records, one: int, other: int) -> None:
    here, there = heap[one], heap[other]
    here.key, there.key = there.key, here.key
    here.rank, there.rank = there.rank, here.rank
    here.item, there.item = there.item, here.item


@inlined
def _before(one: Any, other: Any) -> bool:
    """Whether an entry of a heap goes before another one."""
    if one.key != other.key:
        return bool(one.key < other.key)
    return bool(one.rank < other.rank or (one.rank == other.rank and one.item < other.item))


@inlined
def set_due(link: int, due: float, links: Records) -> None:
    """Set when a link is due, and move it to where it belongs in the heap of links."""
    links[link].due = due
    at, size = links[link].where, len(links)
    while at and links[links[(at - 1) // 2].heap].due > due:
        links[at].heap = links[(at - 1) // 2].heap
        links[links[at].heap].where = at
        at = (at - 1) // 2
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and links[links[child + 1].heap].due < links[links[child].heap].due:
            child += 1
        if links[links[child].heap].due >= due:
            break
        links[at].heap = links[child].heap
        links[links[at].heap].where = at
        at = child
    links[at].heap = link
    links[link].where = at
