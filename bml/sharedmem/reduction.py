"""The allreduce in shared memory on one server: it adds a share of all contributions, then reads all shares.

This is a reduce-scatter followed by an all-gather, both by direct reads of the other servers' memory. A small
vector is added as a whole by every server instead. The protocol of the step is in bml.protocol.step.direct;
here is the arithmetic.
"""

from __future__ import annotations

import weakref
from enum import Enum
from functools import partial

import numpy as np

from bml.io.copies import copy
from bml.io.memory import Array, private_pool
from bml.protocol.step.direct import Sum
from bml.protocol.step.spans import runs
from bml.protocol.step.workspace import OPS, Padded, vector_of
from bml.schedule.algorithms.direct import DirectProgram, adds_whole
from bml.sharedmem.joined_mapping import JoinedMapping
from bml.sharedmem.pool import SharedPool
from bml.sharedmem.result_shares import ResultShares
from bml.sharedmem.segment import SegmentAddress, map_to_read
from bml.sharedmem.status_page import InputPlace, PeerStatusPage
from bml.sharedmem.status_pages import StatusPages
from bml.topology.errors import InvariantError

_BLOCK_NBYTES = 512 << 10
"""Contributions are added block by block, so that the partial sum stays in the cache."""
_SMALL_NBYTES = 32 << 10
"""Memory for smaller results comes from the heap, which is in the cache and quicker than the pool."""
_MOST_FOUND = 1024
_NOTHING: Array = np.empty(0, np.uint8)


class Use(Enum):
    """The use that a user makes of the result of a step."""

    OWN = "the user gets a copy of its own, and usually drops it soon"
    READ = "the user only reads it, in place if possible"
    KEPT = "it is kept for long, so it must not take memory of the pool of results"


class Reduction:
    """The steps of one server, one after the other, in one thread.

    The calls of a step are `contribute`, `add`, `join` and `hold` where `add` returned False, `fetch` and
    `take`. `add` and `join` open memory of other servers. If the step is over for those servers, as in
    another view, the memory may have any content: then `add` and `join` raise OSError or ValueError, or the
    result is worthless.
    """

    def __init__(self, pages: StatusPages, pool: SharedPool):
        self.nbytes_copied = 0
        """Bytes of contributions that lay outside of the pool and were copied into it."""
        self._pages = pages
        self._pool = pool
        self._results = private_pool()
        self._regions: dict[tuple[int, int], Array] = {}
        self._found: dict[tuple[object, ...], list[Array]] = {}
        self._changes: dict[int, int] = {}
        """Server -> how often its memory had changed when its regions were mapped."""
        self._result_shares = ResultShares(pages.own)
        self._vector = _NOTHING
        self._located: weakref.ref[Array] = weakref.ref(_NOTHING)
        """The contribution that lies in the pool at `_place`; dead while a copy lies there."""
        self._place: InputPlace | None = None
        self._staged: Array | None = None
        self._unstaged: tuple[int, int] | None = None
        """The elements of `_staged` that were not copied; None: the others may read all."""
        self._op = OPS["sum"]
        self._use = Use.OWN
        self._sum: Sum | None = None
        self._whole = False
        self._shares: JoinedMapping | None = None
        self._set = 0
        self._entry: int | None = None
        self._fetched: Array | None = None
        """The user's own result while it has only this server's share."""
        self._result: Array | None = None

    @property
    def shared_nbytes(self) -> int:
        """Bytes of memory that this server's shares of results take."""
        return self._result_shares.nbytes

    def empty(self, n_elements: int, dtype: str) -> Array:
        """An uninitialised, one-dimensional contribution, in memory that the other servers can read."""
        return self._pool.empty(n_elements, dtype)

    def forget_mappings(self) -> None:
        """Unmap all memory of other servers: that of servers that have left must not be kept.

        It is mapped again when it is needed.
        """
        self._regions.clear()
        self._found.clear()
        self._result_shares.forget_mappings()

    def contribute(
        self,
        contribution: Array | Padded,
        op: str,
        use: Use,
        signature: int,
        text: str,
        members: tuple[int, ...],
    ) -> None:
        """Take this contribution to the next step of these servers, and describe it on the status page.

        `contribution` is one-dimensional and contiguous. It must not change until the step is committed or
        contributed to again. `op` is a key of `OPS`, and `use` says how the result is used. Raises
        FabricError when a copy is necessary and there is no memory for it.
        """
        place, vector = self._place, vector_of(contribution)
        filled = contribution[1:] if isinstance(contribution, Padded) else None
        self._vector, self._op, self._use = vector, OPS[op], use
        if vector is not self._located() or (place is not None and place.changes != self._pool.changes):
            self._place = self._locate(vector, members)
        if self._entry is not None:
            self._pages.own.release(self._entry)  # it is of an attempt that failed
        self._sum = self._fetched = self._result = self._entry = self._shares = None
        # Only the first member's choice counts. None is needed if every server may add the whole vector.
        chooses = self._pages.server == members[0] and not adds_whole(len(members), vector.nbytes, True)
        choice = self._pages.free_set() if chooses else 0
        self._pages.own.describe(signature, text, self._place, choice, use is Use.READ, filled)

    def add(self, instruction: Sum) -> bool:
        """Carry out a `Sum`: all members are ready. Returns True if it was the whole vector, not a share.

        A share is also copied into the user's own result, block by block, while it is in the cache. Raises
        OSError or ValueError if the memory of a member is gone, NoRoom if this process may map no more.
        """
        self._sum = instruction
        if self._unstaged not in (None, instruction[2:4]):
            raise InvariantError(f"{instruction} reads what was not copied: {self._unstaged}")
        start, stop, members = instruction.start, instruction.stop, instruction.members
        dtype = self._vector.dtype
        self._whole = instruction.adds_whole(self._pages.in_place(members))
        if self._whole:
            if self._unstaged is not None:
                raise InvariantError(f"all add the whole vector, of which {self._unstaged} was not copied")
            self._result = self._empty_result()
            if self._vector.size:
                self._add_filled(members, self._result, 0, self._vector.size)
            return True
        self._set = self._pages[members[0]].result_set
        if self._use is not Use.READ:
            self._fetched = self._empty_result()
        self._result_shares.begin(instruction.share * dtype.itemsize)
        if stop > start:
            place = self._result_shares.own(self._set, instruction.share * dtype.itemsize)
            share = np.frombuffer(place, dtype, stop - start)
            fetched = None if self._fetched is None else self._fetched[start:stop]
            self._add_filled(members, share, start, stop, fetched)
        return False

    def join(self) -> None:
        """Map the shares of all members, unless this server has added the whole: all members are done.

        A server that is complete must be able to fetch the result, even if the others die now. Raises OSError
        or ValueError if a share is gone.
        """
        if not self._whole:
            assert self._sum is not None
            nbytes = self._sum.share * self._vector.itemsize
            used = self._pages.of(self._sum.members)[: -(-self._vector.nbytes // nbytes)]
            self._shares = self._result_shares.join(self._set, used, nbytes)

    def hold(self) -> None:
        """If the user will read the result in place, keep all servers from writing there; before COMPLETE."""
        if self._use is Use.READ and self._sum is not None and not self._whole:
            self._entry = self._pages.own.hold(self._set)

    def fetch(self) -> None:
        """Fetch the result, once: all members are done.

        The result is a copy in new memory, or an array where the shares lie. It stays here until `take`.
        """
        if self._result is None:
            assert self._sum is not None
            assert self._shares is not None
            size, dtype = self._vector.size, self._vector.dtype
            joined, self._shares = self._shares, None
            if self._entry is not None:
                entry, self._entry = self._entry, None
                self._result = joined.array(size, dtype, partial(self._pages.own.release, entry))
            else:
                self._result = self._fetch_result(joined.view(size, dtype), self._sum)

    def take(self) -> Array:
        """Return the result, and forget it."""
        self.fetch()
        result, self._result = self._result, None
        self._vector = _NOTHING  # its memory is free for the next contribution
        assert result is not None
        return result

    def close(self) -> None:
        """Let no process open this server's memory any more; mappings stay valid."""
        self._pool.close()
        self._result_shares.close()

    def _fetch_result(self, shares: Array, done: Sum) -> Array:
        """The user's own result: copy the shares that this server did not add itself.

        The shares behind its own come first, so that the servers read different shares at the same time.
        """
        result, self._fetched = self._fetched, None
        there = done.stop
        if result is None:  # the user wanted to read it in place, which was not possible
            result, there = self._empty_result(), done.start
        result[there:] = shares[there:]
        result[: done.start] = shares[: done.start]
        return result

    # --- the places of contributions and results -------------------------------------------------

    def _empty_result(self) -> Array:
        size, dtype = self._vector.size, self._vector.dtype
        if self._use is Use.KEPT or self._vector.nbytes < _SMALL_NBYTES:
            return np.empty(size, dtype)
        return self._results.empty(size, dtype)

    def _locate(self, vector: Array, members: tuple[int, ...]) -> InputPlace | None:
        """Where other servers find the contribution, which is copied into the pool if it lies elsewhere.

        None without elements.
        """
        self._located, self._staged = weakref.ref(_NOTHING), None  # the last copy's place is free
        self._unstaged = None
        if not vector.size:
            return None
        place = self._pool.locate(vector)
        if place is not None:
            self._located = weakref.ref(vector)
            return place
        self._staged = staged = self._pool.empty(vector.size, vector.dtype)
        self._unstaged = self._own_share(vector, members)
        start, stop = self._unstaged or (0, 0)
        copy(staged[:start], vector[:start])
        copy(staged[stop:], vector[stop:])
        self.nbytes_copied += vector.nbytes - (stop - start) * vector.itemsize
        return self._pool.locate(staged)

    def _own_share(self, vector: Array, members: tuple[int, ...]) -> tuple[int, int] | None:
        """The elements that this server alone reads, as it adds them; None if others may read all of them."""
        part = DirectProgram(self._pages.server, members).part(vector.size, vector.itemsize)
        adds_shares = not part.whole_in_place and (self._use is Use.READ or not part.whole)
        return (part.start, part.stop) if adds_shares else None

    def _contributions(self, members: tuple[int, ...]) -> list[Array]:
        """The contributions of these servers; usually they lie where they lay in an earlier step."""
        vector, pages = self._vector, self._pages.of(members)
        key = (members, vector.size, vector.dtype, *[page.input_key for page in pages])
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            self._forget_what_is_gone(pages)
            found = self._found[key] = [self._contribution(page) for page in pages]
        parts = found.copy()
        parts[members.index(self._pages.server)] = vector
        return parts

    def _forget_what_is_gone(self, pages: list[PeerStatusPage]) -> None:
        """Unmap the memory of servers that have made or dropped segments since it was mapped."""
        changed = {page.server for page in pages if self._changes.get(page.server) != page.input.changes}
        if changed:
            self._found.clear()
            self._regions = {key: region for key, region in self._regions.items() if key[0] not in changed}
            self._changes.update((page.server, page.input.changes) for page in pages)

    def _contribution(self, page: PeerStatusPage) -> Array:
        if page.server == self._pages.server:
            return _NOTHING  # a kept view would keep its memory from being used again
        vector, (segment, offset, _) = self._vector, page.input
        return self._region(page.server, segment)[offset : offset + vector.nbytes].view(vector.dtype)

    def _region(self, server: int, segment: SegmentAddress) -> Array:
        region = self._regions.get((server, segment.serial))
        if region is None:
            region = np.frombuffer(map_to_read(segment), np.uint8)
            self._regions[server, segment.serial] = region
        return region

    # --- arithmetic ------------------------------------------------------------------------------

    def _add_filled(
        self, members: tuple[int, ...], out: Array, start: int, stop: int, copy: Array | None = None
    ) -> None:
        """Add the contributions of these servers, as `_add` does; the zeros of padded ones are not read."""
        parts = self._contributions(members)
        filled = self._pages.filled(members)
        if filled is None:
            self._add(parts, out, start, stop, copy)
            return
        for a, b, numbers in runs(filled, start, stop):
            run = slice(a - start, b - start)
            terms = [parts[number] for number in numbers]
            self._add(terms, out[run], a, b, None if copy is None else copy[run])

    def _add(self, parts: list[Array], out: Array, start: int, stop: int, copy: Array | None = None) -> None:
        """out[0:stop-start] = the parts' elements [start, stop), added in order; the same into `copy`."""
        blocks = len(parts) > 2 or copy is not None  # else no partial sum is read again
        size = max(1, _BLOCK_NBYTES // out.itemsize) if blocks else stop - start
        op = self._op
        for a in range(start, stop, size):
            b = min(a + size, stop)
            block = out[a - start : b - start]
            if len(parts) < 2:
                block[...] = parts[0][a:b] if parts else 0
            else:
                op(parts[0][a:b], parts[1][a:b], out=block)
            for part in parts[2:]:
                op(block, part[a:b], out=block)
            if copy is not None:
                copy[a - start : b - start] = block
