"""What a server shows to those of its host that may read its memory in place of payloads on the wire.

A page of words, which its owner alone writes and every word at once (`status_page` says why that is enough):

    0   fences    how often its owner has fenced: references sent before must not be used any more
    1   dropped   how often pieces of memory have gone from the table: who has some mapped must look anew
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
"""What lies in segments beyond these is sent."""

_FENCES, _DROPPED, _PROOF, _TABLE = 0, 1, 2, 8
_READABLE = _TABLE + 2 * MOST_SEGMENTS
_WHAT = "registration page"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class RegistrationPageAddress(NamedTuple):
    """How others find a server's registration page: by the running machine, the container and the process.

    `nonce` is different for every registration page.
    """

    boot: str
    namespace: int
    process: int
    fd: int
    nbytes: int
    nonce: int


def boot_id() -> str:
    """What is different for every run of every machine."""
    return _BOOT.read_text().strip()


def host() -> tuple[str, int]:
    """What all processes have in common that see each other under their numbers: machine and container."""
    return boot_id(), process_namespace()


class RegistrationPage:
    """This server's own, with room for `n_servers`. Raises NoRoom when there is no memory."""

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
        """How often it was fenced."""
        return self._words[_FENCES]

    def fence(self) -> None:
        """From now on no reference that was sent before is used."""
        self._words[_FENCES] = (self._words[_FENCES] + 1) & 0xFFFFFFFF

    def add(self, segments: Iterable[SegmentAddress]) -> list[int]:
        """Show segments; returns the numbers of those, in order, for which there is room."""
        words, numbers = self._words, []
        free = (number for number in range(MOST_SEGMENTS) if not words[_TABLE + 2 * number + 1])
        for segment, number in zip(segments, free, strict=False):
            at = _TABLE + 2 * number
            words[at], words[at + 1] = segment.fd, segment.nbytes
            numbers.append(number)
        return numbers

    def drop(self, numbers: Sequence[int]) -> None:
        """Show these no more: they are gone."""
        for number in numbers:
            self._words[_TABLE + 2 * number + 1] = 0
        if numbers:
            self._words[_DROPPED] += 1

    def reads(self, server: int, nonce: int) -> None:
        """Say that this server can read the memory of the server with this nonce; 0: that it cannot."""
        self._words[_READABLE + server] = nonce

    def close(self) -> None:
        """Let nobody open it any more."""
        self._segment.close()


class PeerRegistrationPage:
    """Another server's registration page, to be read, and its memory.

    Raises OSError or ValueError if it cannot be mapped, or is not what its address says.
    """

    def __init__(self, token: bytes, job: str, server: int, address: RegistrationPageAddress):
        self.address = address
        memory = map_to_read(SegmentAddress(address.process, address.fd, 0, address.nbytes))
        shown = bytes(memory[8 * _PROOF : 8 * _PROOF + PROOF_NBYTES])
        if not proves(shown, token, _WHAT, job, server, address):
            raise ValueError("what it shows is not of this job, or without its token")
        self._words = memory.cast("Q")
        self._regions: dict[int, memoryview] = {}
        self._dropped = 0

    @property
    def fences(self) -> int:
        """How often it was fenced."""
        return self._words[_FENCES]

    def reads(self, server: int) -> int:
        """The nonce of that server's registration page, if this peer can read its memory."""
        return self._words[_READABLE + server]

    def region(self, number: int) -> memoryview:
        """The segment of this number, mapped when it is first wanted. What its owner dropped is unmapped."""
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
