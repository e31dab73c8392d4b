"""The shares of results: each server adds one share, and maps the shares of all to fetch the result.

A result set is a place for the shares of one result. There are several, so that a user can still read an
earlier result where it lies while the next step is added in another set.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from bml.io.memory import idle
from bml.sharedmem.joined_mapping import JoinedMapping
from bml.sharedmem.segment import Segment
from bml.sharedmem.status_page import PeerStatusPage, StatusPage

_MOST_JOINED = 16
_PAGE_NBYTES = 4096


@dataclass
class _OwnShare:
    """This server's place in a result set: how much of it was used at most, and when it was needed last."""

    segment: Segment
    touched_nbytes: int = 0
    needed_at: int = 0


@dataclass
class _Shares:
    """The mapped shares of all members in a result set, `nbytes` each; `serials` tell where each lay."""

    joined: JoinedMapping
    result_set: int
    nbytes: int
    serials: tuple[int, ...]
    needed_at: int = 0


class ResultShares:
    """This server's own shares, and the mapped shares of all servers.

    The calls of a step are `begin`, `own` and `join`, in one thread. Memory that was not needed while 16
    times as many bytes were used is dropped, by its owner and by the servers that have it mapped. They decide
    alike, as all see the same steps.
    """

    def __init__(self, page: StatusPage):
        self._page = page
        self._own: dict[int, _OwnShare] = {}
        self._joined: OrderedDict[tuple[int, ...], _Shares] = OrderedDict()
        # The bytes of all shares so far: the clock by which idle memory is found.
        self._volume = 0
        self._review_at = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this server's own shares take."""
        return sum(share.touched_nbytes for share in self._own.values())

    def begin(self, nbytes: int) -> None:
        """Begin a step whose shares have `nbytes` each.

        All members are ready, so no server needs the shares of an older step that are not held.
        """
        self._volume += nbytes
        if self._volume >= self._review_at:
            self._review()

    def own(self, result_set: int, nbytes: int) -> memoryview:
        """This server's place in a result set, of `nbytes` in whole pages. Raises NoRoom."""
        share = self._own.get(result_set)
        if share is None or share.segment.address.nbytes < nbytes:
            if share is not None:
                share.segment.close()
                del self._own[result_set], share  # freed before another is made
            # Some more than asked for: the kernel gives pages only when they are used.
            share = _OwnShare(Segment(-(-(nbytes + nbytes // 4) // _PAGE_NBYTES) * _PAGE_NBYTES))
            self._own[result_set] = share
            self._page.put_share(result_set, share.segment.address)
        if nbytes > share.touched_nbytes:
            share.touched_nbytes = nbytes
        if 4 * nbytes >= share.touched_nbytes:
            share.needed_at = self._volume
        return share.segment.memory[:nbytes]

    def join(self, result_set: int, pages: Sequence[PeerStatusPage], nbytes: int) -> JoinedMapping:
        """The shares of these servers, mapped one behind the other, `nbytes` of each.

        Mappings are kept, as most steps want the same ones. Raises OSError or ValueError if a share is gone.
        """
        serials = tuple([page.share_key(result_set) for page in pages])
        key = (nbytes, *serials)
        shares = self._joined.pop(key, None)
        if shares is None:
            self._forget_what_is_gone(result_set, pages)
            joined = JoinedMapping([page.share(result_set) for page in pages], nbytes)
            shares = _Shares(joined, result_set, nbytes, serials)
        shares.needed_at = self._volume
        self._joined[key] = shares
        if len(self._joined) > _MOST_JOINED:
            self._joined.popitem(last=False)
        return shares.joined

    def forget_mappings(self) -> None:
        """Unmap all shares: the memory of servers that have left must not be kept."""
        self._joined.clear()

    def close(self) -> None:
        """Let no process open this server's shares any more."""
        for share in self._own.values():
            share.segment.close()

    def _forget_what_is_gone(self, result_set: int, pages: Sequence[PeerStatusPage]) -> None:
        """Unmap shares that lie elsewhere now; usually a server has a larger place in this result set."""
        now = [page.share_key(result_set) for page in pages]
        for key, shares in list(self._joined.items()):
            if shares.result_set == result_set and any(
                old != new for old, new in zip(shares.serials, now, strict=False)
            ):
                del self._joined[key]

    def _review(self) -> None:
        for result_set, share in list(self._own.items()):
            if idle(self._volume, share.needed_at, share.touched_nbytes):
                share.segment.close()
                del self._own[result_set]
        for key, shares in list(self._joined.items()):
            if idle(self._volume, shares.needed_at, shares.nbytes):
                del self._joined[key]
        self._review_at = self._volume + max(
            (share.touched_nbytes for share in self._own.values()), default=0
        )
