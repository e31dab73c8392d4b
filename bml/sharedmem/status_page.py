"""What a server lets the others of its host see: where it stands, where its data lies, what it reads.

One writes, all others read, and nothing waits for anything: every field is a 64-bit word, written at once,
and the word that says how far the server is comes last.

    0   changes        counts posts; its lower half is what others sleep on
    1   standing       epoch, step and stage of the last post; grows within an epoch
    2   call           signature of what this step is; the bit above it: its user reads the result in place
    3.. input          process-wide serial, descriptor, size of its segment, offset in it; above the serial,
                       of 32 bits, how often its owner's memory changed: what is mapped of it may be gone
    7   result set     which one takes the shares of this step; the first member's counts
    8.. proof          that the owner has the cluster's token, 32 bytes
    12  asleep         1: sleeps until somebody posts, wants to be woken
    32  held           per entry the number of a result set that this server's user still reads, plus 1
    64  shares         per result set serial, descriptor and size of this server's segment
    512 text           what the user called: its length, then utf-8
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
"""Result sets that users may read in place; the one after them is always free."""
N_SETS = N_HELD + 1
STATUS_PAGE_NBYTES = 3 * mmap.PAGESIZE

STANDING, CALL, ASLEEP = 1, 2, 12
"""Words that are looked at in every wait."""
IN_PLACE = 1 << 32
"""The bit above the signature of a call."""
_CHANGES, _INPUT, _SET, _PROOF = 0, 3, 7, 8
_HELD, _SHARES, _TEXT = 32, 64, 512
_SHARE_WORDS = 3
_TEXT_AT = 8 * (_TEXT + 1)
_WHAT = "status page"
_NOTHING_HELD = bytes(8 * N_HELD)


class StatusPageAddress(NamedTuple):
    """How others find a server's status page."""

    process: int
    fd: int
    namespace: int
    """Which processes have such numbers: those of one container."""


class InputPlace(NamedTuple):
    """Where a contribution lies: in which segment, from which byte on.

    `changes`: how often its owner had made or dropped segments by then.
    """

    segment: SegmentAddress
    offset: int
    changes: int


class StatusPage:
    """This server's own status page."""

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
        self, signature: int, text: str, place: InputPlace | None, result_set: int, in_place: bool = False
    ) -> None:
        """Say what the next READY is about; `place` is None for a vector without elements.

        `in_place`: the user would read the result where it lies.
        """
        words = self._words
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
        """Let everybody see where this server stands; who is asleep is to be woken."""
        words = self._words
        words[STANDING] = standing(epoch, step, stage)
        words[_CHANGES] = (words[_CHANGES] + 1) & 0xFFFFFFFF

    def wake(self) -> None:
        """Wake all who sleep until this server posts."""
        futex.wake(self._changes_at)

    def sleeps(self, asleep: bool) -> None:
        """Say whether this server is about to sleep, and wants to be woken."""
        self._words[ASLEEP] = asleep

    def put_share(self, result_set: int, segment: SegmentAddress) -> None:
        """Say where this server's shares of a result set lie from now on."""
        at = _SHARES + _SHARE_WORDS * result_set
        _, fd, serial, nbytes = segment
        self._words[at], self._words[at + 1], self._words[at + 2] = serial, fd, nbytes

    def hold(self, result_set: int) -> int | None:
        """Say that the user reads this result set; returns what to `release`, None if he may not."""
        if result_set >= N_HELD:
            return None
        for entry in range(_HELD, _HELD + N_HELD):
            if not self._words[entry]:
                self._words[entry] = result_set + 1
                return entry
        return None

    def release(self, entry: int) -> None:
        """The user reads it no more; any thread may say so."""
        self._words[entry] = 0

    def close(self) -> None:
        """Let nobody open it any more; others still see which results are let go."""
        self._segment.hide()

    def forked(self) -> None:
        """What this process drops of the results that its parent holds must not be let go of there."""
        self._words = memoryview(bytearray(STATUS_PAGE_NBYTES)).cast("Q")


class PeerStatusPage:
    """Another server's status page, or this one's, to be read: `words`.

    Raises OSError if it cannot be mapped, NoRoom if this process can map no more.
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
        """Counts posts; read it before the word STANDING, then `wait` misses none."""
        return self.words[_CHANGES]

    @property
    def text(self) -> str:
        """What its user called."""
        nbytes = min(self.words[_TEXT], MAX_TEXT_NBYTES)
        return bytes(self._memory[_TEXT_AT : _TEXT_AT + nbytes]).decode(errors="replace")

    @property
    def result_set(self) -> int:
        """Which result set it has chosen."""
        return min(self.words[_SET], N_SETS - 1)

    @property
    def input_key(self) -> tuple[int, int]:
        """What tells where its contribution lies from where others lay: serial, with changes, and offset."""
        return self.words[_INPUT], self.words[_INPUT + 3]

    def share_key(self, result_set: int) -> int:
        """What tells its shares of a result set from those that lay there before: a serial."""
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
        """Result sets that its user reads, or read when it died."""
        if self._held.tobytes() == _NOTHING_HELD:  # as a rule
            return set()
        return {entry - 1 for entry in self.words[_HELD : _HELD + N_HELD] if entry}

    def wait(self, changes: int, timeout_s: float) -> None:
        """Sleep until it posts again, if it has not since `changes`, at most so long; may return early."""
        futex.wait(self._changes_at, changes, timeout_s)


def process_namespace() -> int:
    """What this process shares with all that see it under its number."""
    return os.stat("/proc/self/ns/pid").st_ino
