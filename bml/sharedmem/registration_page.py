"""The registration page: how servers of a host find and check the memory that zero-copy sends refer to.

It is an array of 64-bit words. Only its owner writes it, a word at a time, and every word is complete when a
reader sees it (`status_page` says why that is enough):

    0   fences    how often its owner has fenced: references sent before must not be used any more
    1   dropped   how often segments have left the table: a reader that has some mapped must look again
    2.. proof     that the owner has the cluster's token, 32 bytes
    8.. segments  descriptor and size of each piece of memory that it refers to, 0 where there is none
    520 readable  per server the nonce of its registration page, if the owner can read that server's memory
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bml.sharedmem.proof import PROOF_NBYTES, proof_of, proves
from bml.sharedmem.segment import Segment, SegmentAddress, map_to_read
from bml.sharedmem.status_page import process_namespace

MOST_SEGMENTS = 256
"""The most segments that a page shows. Payloads in other segments are sent."""

_FENCES, _DROPPED, _PROOF, _TABLE = 0, 1, 2, 8
_READABLE = _TABLE + 2 * MOST_SEGMENTS
_WHAT = "registration page"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class RegistrationPageAddress(NamedTuple):
    """The address of a server's registration page: machine, container, process and file descriptor.

    `nonce` is different for every registration page.
    """

    boot: str
    namespace: int
    process: int
    fd: int
    nbytes: int
    nonce: int


def boot_id() -> str:
    """An id that differs for every boot of every machine. Raises OSError."""
    return _BOOT.read_text().strip()


def host() -> tuple[str, int]:
    """(machine, container): all processes with the same pair see each other under the same process ids."""
    return boot_id(), process_namespace()


class RegistrationPage:
    """This server's own page, for a job of `n_servers`. Raises NoRoom when there is no memory."""

    def __init__(self, token: bytes, job: str, server: int, n_servers: int):
        n_words = _READABLE + n_servers
        self._segment = Segment(-(-8 * n_words // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._words = self._segment.memory.cast("Q")
        process, fd, _, nbytes = self._segment.address
        self.address = RegistrationPageAddress(*host(), process, fd, nbytes, secrets.randbits(62) + 1)
        proof = proof_of(token, _WHAT, job, server, self.address)
        self._segment.memory[8 * _PROOF : 8 * _PROOF + PROOF_NBYTES] = proof

    @property
    def fences(self) -> int:
        """The number of the owner's fences."""
        return self._words[_FENCES]

    def fence(self) -> None:
        """From now on no reference that was sent before is used."""
        self._words[_FENCES] = (self._words[_FENCES] + 1) & 0xFFFFFFFF

    def add(self, segments: Iterable[SegmentAddress]) -> list[int]:
        """Show segments; returns the numbers of those for which there is room, in order."""
        words, numbers = self._words, []
        free = (number for number in range(MOST_SEGMENTS) if not words[_TABLE + 2 * number + 1])
        for segment, number in zip(segments, free, strict=False):
            at = _TABLE + 2 * number
            words[at], words[at + 1] = segment.fd, segment.nbytes
            numbers.append(number)
        return numbers

    def drop(self, numbers: Sequence[int]) -> None:
        """Show these segments no more: they are gone."""
        for number in numbers:
            self._words[_TABLE + 2 * number + 1] = 0
        if numbers:
            self._words[_DROPPED] += 1

    def reads(self, server: int, nonce: int) -> None:
        """Say that this server can read the memory of the server with this nonce; 0: that it cannot."""
        self._words[_READABLE + server] = nonce

    def close(self) -> None:
        """Let no process open the page any more."""
        self._segment.close()


class PeerRegistrationPage:
    """Another server's registration page, and the memory that it shows, mapped to read.

    Raises OSError or ValueError if the page cannot be mapped, or does not prove what its address says; NoRoom
    if this process may map no more.
    """

    def __init__(self, token: bytes, job: str, server: int, address: RegistrationPageAddress):
        self.address = address
        memory = map_to_read(SegmentAddress(address.process, address.fd, 0, address.nbytes))
        shown = bytes(memory[8 * _PROOF : 8 * _PROOF + PROOF_NBYTES])
        if not proves(shown, token, _WHAT, job, server, address):
            raise ValueError("its registration page is not of this job, or was made without its token")
        self._words = memory.cast("Q")
        self._regions: dict[int, memoryview] = {}
        self._dropped = 0

    @property
    def fences(self) -> int:
        """The number of the owner's fences."""
        return self._words[_FENCES]

    def reads(self, server: int) -> int:
        """The nonce of that server's registration page, if this peer can read its memory."""
        return self._words[_READABLE + server]

    def region(self, number: int) -> memoryview:
        """The segment of this number, mapped at the first call. Segments that the owner dropped are unmapped.

        Raises OSError and NoRoom as `map_to_read`, ValueError if there is no such segment.
        """
        words = self._words
        if self._dropped != words[_DROPPED]:
            self._dropped = words[_DROPPED]
            self._regions.clear()
        found = self._regions.get(number)
        if found is None:
            at = _TABLE + 2 * number
            fd, nbytes = words[at : at + 2] if number < MOST_SEGMENTS else (0, 0)
            if not nbytes:
                raise ValueError(f"there is no segment {number}")
            segment = SegmentAddress(self.address.process, fd, number, nbytes)
            found = self._regions[number] = map_to_read(segment)
        return found
