"""The receiving half of a verbs connection: messages in the ring become frames, payloads land in place.

It touches no queue pair. Whoever owns that says what was written (`message_came`, `landed`) and sends the
`replies`. The handler may fence or end the connection from inside any of its methods; `life` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from bml.io.memory import Array
from bml.io.sendqueue import Counters
from bml.protocol.wire.frame import HEADER_NBYTES, FrameError, Header, unpack
from bml.topology.errors import InvariantError
from bml.transport.interface import Verdict
from bml.transport.verbs import wire
from bml.transport.verbs.rdma import NicMemory
from bml.transport.verbs.wire import Grant, Slot

MAX_OFFERS = 128
"""Payloads of one direction of a link that are offered and not written completely."""


class _Landing(NamedTuple):
    """A frame of the peer's that was granted: where it belongs, and where it is written if not there."""

    header: Header
    view: memoryview
    bounce: Array | None


class Incoming:
    """Messages are counted since the connection was made, over all generations of its queue pair."""

    def __init__(
        self,
        ring: memoryview,
        slots: int,
        memory: NicMemory,
        counters: Counters,
        max_nbytes: int,
        admit: Callable[[Header], memoryview | Verdict],
        received: Callable[[Header], None],
        granted: Callable[[int, Iterable[Grant]], None],
    ) -> None:
        self.paused = False
        """A frame waits for `admit` to say something else than WAIT."""
        self.life = 0
        """Changes when everything under way has been given up."""
        self.handled = 0
        """Messages that are done with."""
        self.replies: list[Grant] = []
        """What the peer must be told about its offers."""
        self._ring = ring
        self._slots = slots
        self._slot_nbytes = len(ring) // slots
        self._pool, self._nic_number = memory
        self._counters = counters
        self._max_nbytes = max_nbytes
        self._admit = admit
        self._received = received
        self._granted = granted
        self._arrived = 0
        # Items of the next message that are handled already; they stay so if it is written again.
        self._item = 0
        self._landings: dict[int, _Landing] = {}

    @property
    def is_landing(self) -> bool:
        """Whether the peer may write to memory that was granted."""
        return bool(self._landings)

    def give_up(self) -> None:
        """The queue pair is gone: nothing that was granted will come, what was not handled comes again."""
        self.life += 1
        self._landings.clear()
        self._arrived = self.handled
        # The peer must hear of every offer that was admitted, but these places are not to be written.
        self.replies = [Grant(reply.offer, 0, 0) for reply in self.replies]

    def message_came(self) -> None:
        """The peer wrote the next message; raises FrameError if there was no room for it."""
        self._arrived += 1
        if self._arrived - self.handled > self._slots:
            raise FrameError("the peer wrote more messages than there are slots")

    def handle(self) -> None:
        """Handle the messages that are there in their order, up to a frame that has to wait.

        Raises FrameError if they are not what a peer says.
        """
        life = self.life
        while self.handled < self._arrived and not self.paused and self.life == life:
            start = self.handled % self._slots * self._slot_nbytes
            self._handle(self._ring[start : start + self._slot_nbytes])

    def landed(self, offers: range) -> None:
        """These payloads are complete; raises FrameError if they were not granted."""
        life = self.life
        for offer in offers:
            landing = self._landings.pop(offer & wire.OFFER_MASK, None)
            if landing is None:
                raise FrameError(f"the peer wrote payload {offer}, which was not granted")
            header = landing.header
            if landing.bounce is not None:
                landing.view[:] = landing.bounce.data
                self._counters.nbytes_copied_received += header.nbytes
            self._counters.frames_received += 1
            self._counters.nbytes_received += HEADER_NBYTES + header.nbytes
            self._received(header)
            if self.life != life:
                return  # the others go nowhere

    def _handle(self, slot: memoryview) -> None:
        """Handle the message that is next, from `_item` on."""
        kind, count = wire.HEAD.unpack_from(slot)
        if kind == Slot.FRAME:
            self._take_frame(slot)
            return
        if kind == Slot.OFFERS:
            while self._item < count:
                if not self._take_offer(*wire.read_offer(slot, self._item)):
                    return
                self._item += 1
        elif kind == Slot.GRANTS:
            self._granted(*wire.read_grants(slot, count))
        elif kind == Slot.CANCELS:
            for offer in wire.read_cancels(slot, count):
                self._landings.pop(offer & wire.OFFER_MASK, None)
        else:
            raise FrameError(f"message of kind {kind} in a slot")
        self._message_is_done()

    def _message_is_done(self) -> None:
        self.handled += 1
        self._item = 0

    def _ask(self, header: Header) -> memoryview | Verdict | None:
        """What `admit` says; None if the frame is to be asked for again, or never."""
        life = self.life
        verdict = self._admit(header)
        if self.life != life:
            return None
        if verdict is Verdict.WAIT:
            self.paused = True
            return None
        if isinstance(verdict, Verdict):
            self._counters.frames_received += 1
        elif verdict.nbytes != header.nbytes or verdict.readonly:
            raise InvariantError(f"admit gave {verdict!r} of {verdict.nbytes} bytes for {header}")
        return verdict

    def _take_frame(self, slot: memoryview) -> None:
        header = unpack(slot, wire.HEAD.size, self._slot_nbytes - wire.FRAME_OVERHEAD_NBYTES)
        verdict = self._ask(header)
        if verdict is None:
            return
        self._counters.nbytes_received += HEADER_NBYTES + header.nbytes
        if isinstance(verdict, memoryview) and header.nbytes:
            start = wire.FRAME_OVERHEAD_NBYTES
            _flat(verdict)[:] = slot[start : start + header.nbytes]
            self._counters.nbytes_copied_received += header.nbytes
        self._message_is_done()
        if isinstance(verdict, memoryview):
            self._counters.frames_received += 1
            self._received(header)

    def _take_offer(self, number: int, head: bytes) -> bool:
        """Ask where the payload belongs and grant it; return whether that is settled."""
        header = unpack(head, 0, self._max_nbytes)
        verdict = self._ask(header)
        if verdict is None:
            return False
        if isinstance(verdict, Verdict):
            self.replies.append(Grant(number, 0, 0))
            return True
        if len(self._landings) >= MAX_OFFERS:
            raise FrameError(f"the peer offered more than {MAX_OFFERS} payloads at once")
        view = _flat(verdict)
        bounce = None
        located = self._pool.find(view)
        if located is None:
            bounce = self._pool.empty(len(view), "uint8")
            located = self._pool.find(bounce)
            assert located is not None
        self._landings[number & wire.OFFER_MASK] = _Landing(header, view, bounce)
        self.replies.append(Grant(number, located.registrations[self._nic_number].rkey, located.address))
        return True


def _flat(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
