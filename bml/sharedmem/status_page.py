"""The status page of a server: its place in the step, where its data lies, which results its user reads.

The servers of a host synchronise by these pages. Only its owner writes a page, all others read it, and no
server waits for a lock: every field is a 64-bit word that is written at once, and the word that says how far
the server has come is written last.

    0   changes        the number of posts; other servers sleep on its lower half (futex)
    1   standing       epoch, step and stage of the last post; grows within an epoch
    2   call           signature of the call of this step; the bits above it: the contribution is padded, and
                       the user reads in place
    3.. input          serial number, descriptor, size of the segment, offset in it. Above the serial
                       number, of 32 bits: how often the owner's memory changed, so that mappings of it may
                       be stale
    7   result set     the one that takes the shares of this step; the first member's word counts
    8.. proof          that the owner has the cluster's token, 32 bytes
    12  asleep         1: the server sleeps until another server posts, and must be woken
    13.. filled        if the contribution is padded: its elements that need not be zero, from and to
    32  held           per entry the number of a result set that this server's user still reads, plus 1
    64  shares         per result set serial number, descriptor and size of this server's segment
    512 text           the call as a text: its length, then utf-8
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

from bml.io import forks
from bml.io.memory import address_of
from bml.protocol.step.direct import Stage, standing
from bml.protocol.wire.frame import MAX_TEXT_NBYTES
from bml.sharedmem import futex
from bml.sharedmem.proof import PROOF_NBYTES, proof_of, proves
from bml.sharedmem.segment import Segment, SegmentAddress, map_to_read

N_HELD = 32
"""The number of result sets that users may read in place; the set after them is always free."""
N_SETS = N_HELD + 1
STATUS_PAGE_NBYTES = 3 * mmap.PAGESIZE

STANDING, CALL, ASLEEP = 1, 2, 12
"""Numbers of the words that are read in every wait."""
PADDED, IN_PLACE = 1 << 32, 1 << 33
"""The bits above the signature of a call."""
SIGNATURE = PADDED - 1
_CHANGES, _INPUT, _SET, _PROOF, _FILLED = 0, 3, 7, 8, 13
_HELD, _SHARES, _TEXT = 32, 64, 512
_SHARE_WORDS = 3
_TEXT_AT = 8 * (_TEXT + 1)
_WHAT = "status page"
_NOTHING_HELD = bytes(8 * N_HELD)


class StatusPageAddress(NamedTuple):
    """The address of a server's status page: process, file descriptor and container."""

    process: int
    fd: int
    namespace: int
    """The PID namespace in which the process has this number: that of its container."""


class InputPlace(NamedTuple):
    """Where a contribution lies: its segment, and its offset in bytes.

    `changes` is how often the owner had made or dropped segments when this was written.
    """

    segment: SegmentAddress
    offset: int
    changes: int


class StatusPage:
    """This server's own status page. Raises NoRoom when there is no memory."""

    def __init__(self, token: bytes, job: str, server: int):
        self._segment = Segment(STATUS_PAGE_NBYTES)
        self._words = self._segment.memory.cast("Q")
        self._changes_at = self._segment.start
        process, fd, _, _ = self._segment.address
        self.address = StatusPageAddress(process, fd, process_namespace())
        proof = proof_of(token, _WHAT, job, server, self.address)
        self._segment.memory[8 * _PROOF : 8 * _PROOF + PROOF_NBYTES] = proof
        forks.on_fork(self)
        self._described: str | None = None
        self._placed: InputPlace | None = None

    def describe(
        self,
        signature: int,
        text: str,
        place: InputPlace | None,
        result_set: int,
        in_place: bool = False,
        filled: tuple[int, int] | None = None,
    ) -> None:
        """Describe the call that the next READY is about; `place` is None for a vector without elements.

        `in_place`: the user wants to read the result where it lies. `filled`: the contribution is zero
        outside of these elements, whatever lies there.
        """
        words = self._words
        if filled is not None:
            words[_FILLED], words[_FILLED + 1] = filled
            signature |= PADDED
        words[CALL] = signature | IN_PLACE if in_place else signature
        words[_SET] = result_set
        if place is not None and place != self._placed:
            self._placed = place
            (_, fd, serial, nbytes), offset, changes = place
            words[_INPUT], words[_INPUT + 1], words[_INPUT + 2], words[_INPUT + 3] = (
                (changes & 0xFFFFFFFF) << 32 | serial,
                fd,
                nbytes,
                offset,
            )
        if text != self._described:
            encoded = text.encode()[:MAX_TEXT_NBYTES]
            self._segment.memory[_TEXT_AT : _TEXT_AT + len(encoded)] = encoded
            words[_TEXT] = len(encoded)
            self._described = text

    def post(self, epoch: int, step: int, stage: Stage) -> None:
        """Show all servers where this one stands; the caller wakes those that sleep."""
        words = self._words
        words[STANDING] = standing(epoch, step, stage)
        words[_CHANGES] = (words[_CHANGES] + 1) & 0xFFFFFFFF

    def wake(self) -> None:
        """Wake all servers that sleep until this one posts."""
        futex.wake(self._changes_at)

    def sleeps(self, asleep: bool) -> None:
        """Show whether this server is about to sleep, so that it must be woken."""
        self._words[ASLEEP] = asleep

    def put_share(self, result_set: int, segment: SegmentAddress) -> None:
        """Show where this server's shares of a result set lie from now on."""
        at = _SHARES + _SHARE_WORDS * result_set
        _, fd, serial, nbytes = segment
        self._words[at], self._words[at + 1], self._words[at + 2] = serial, fd, nbytes

    def hold(self, result_set: int) -> int | None:
        """Show that the user reads this result set.

        Returns the entry to `release`, None if the user may not read it in place.
        """
        if result_set >= N_HELD:
            return None
        for entry in range(_HELD, _HELD + N_HELD):
            if not self._words[entry]:
                self._words[entry] = result_set + 1
                return entry
        return None

    def release(self, entry: int) -> None:
        """Show that the user does not read this result set any more; may be called in any thread."""
        self._words[entry] = 0

    def close(self) -> None:
        """Let no process open the page any more; servers that have it mapped still see releases."""
        self._segment.hide()

    def forked(self) -> None:
        """In a child: use a copy, so that results that the child drops are not released by its parent."""
        self._words = memoryview(bytearray(STATUS_PAGE_NBYTES)).cast("Q")


class PeerStatusPage:
    """Another server's status page, or this server's own, mapped to read as `words`.

    Raises OSError if the page cannot be mapped, NoRoom if this process may map no more.
    """

    def __init__(self, server: int, address: StatusPageAddress):
        self.server = server
        self.address = address
        self._memory = map_to_read(SegmentAddress(address.process, address.fd, 0, STATUS_PAGE_NBYTES))
        self.words = self._memory.cast("Q")
        self._held = self._memory[8 * _HELD : 8 * (_HELD + N_HELD)]
        self._changes_at = address_of(self._memory)

    def proves(self, token: bytes, job: str) -> bool:
        """Whether its owner has the cluster's token and is this server of this job."""
        shown = bytes(self._memory[8 * _PROOF : 8 * _PROOF + PROOF_NBYTES])
        return proves(shown, token, _WHAT, job, self.server, self.address)

    @property
    def lives(self) -> bool:
        """Whether its owner's process may still run."""
        return os.path.exists(f"/proc/{self.address.process}")

    @property
    def changes(self) -> int:
        """The number of posts. If it is read before the word STANDING, `wait` misses no post."""
        return self.words[_CHANGES]

    @property
    def text(self) -> str:
        """The call of its user, as a text."""
        nbytes = min(self.words[_TEXT], MAX_TEXT_NBYTES)
        return bytes(self._memory[_TEXT_AT : _TEXT_AT + nbytes]).decode(errors="replace")

    @property
    def result_set(self) -> int:
        """The result set that it has chosen."""
        return min(self.words[_SET], N_SETS - 1)

    @property
    def input_key(self) -> tuple[int, int]:
        """A key that is different when its contribution lies elsewhere: serial with changes, and offset."""
        return self.words[_INPUT], self.words[_INPUT + 3]

    @property
    def filled(self) -> tuple[int, int] | None:
        """The elements (start, stop) outside of which its contribution is zero; None if it is not padded."""
        words = self.words
        return (words[_FILLED], words[_FILLED + 1]) if words[CALL] & PADDED else None

    def share_key(self, result_set: int) -> int:
        """A key, a serial number, that is different when its shares of a result set lie elsewhere."""
        return self.words[_SHARES + _SHARE_WORDS * result_set]

    @property
    def input(self) -> InputPlace:
        """Where its contribution lies."""
        tells, fd, nbytes, offset = self.words[_INPUT : _INPUT + 4]
        return InputPlace(
            SegmentAddress(self.address.process, fd, tells & 0xFFFFFFFF, nbytes), offset, tells >> 32
        )

    def share(self, result_set: int) -> SegmentAddress:
        """Where its shares of a result set lie."""
        at = _SHARES + _SHARE_WORDS * result_set
        serial, fd, nbytes = self.words[at : at + _SHARE_WORDS]
        return SegmentAddress(self.address.process, fd, serial, nbytes)

    def held(self) -> set[int]:
        """The result sets that its user reads, or was reading when the server died."""
        if self._held.tobytes() == _NOTHING_HELD:  # which is usual
            return set()
        return {entry - 1 for entry in self.words[_HELD : _HELD + N_HELD] if entry}

    def wait(self, changes: int, timeout_s: float) -> None:
        """Sleep until it posts, unless it has posted since `changes`, for `timeout_s` at most.

        May return early.
        """
        futex.wait(self._changes_at, changes, timeout_s)


def process_namespace() -> int:
    """The id of this process's PID namespace: processes with the same id see each other's numbers."""
    return os.stat("/proc/self/ns/pid").st_ino
