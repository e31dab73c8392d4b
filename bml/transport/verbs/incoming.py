"""The receiving half of a verbs connection: messages in the ring become frames, payloads land in place.

It uses no queue pair. The connection, which owns the queue pair, reports what was written (`message_came`,
`landed`) and sends the `replies`. The handler may fence or end the connection from inside any of its methods;
`generation` changes then.
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
"""The most payloads, in one direction of a link, that are offered and not completely written."""


class _Landing(NamedTuple):
    """A granted frame of the peer: its place, and a bounce buffer if that is not registered memory."""

    header: Header
    view: memoryview
    bounce: Array | None


class Incoming:
    """The receiving half: it handles messages and payloads, and collects `replies` to offers.

    Messages are counted since the connection was made, over all generations of its queue pair. `granted`
    takes the grants that come for this server's own offers.
    """

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
        """Whether a frame waits until `admit` returns something else than WAIT."""
        self.generation = 0
        """Grows when all messages and payloads in progress are given up."""
        self.handled = 0
        """The number of messages that have been handled."""
        self.replies: list[Grant] = []
        """The answers to the peer's offers that are still to be sent."""
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
        # The number of items of the next message that are handled already, also if it is written again.
        self._item = 0
        self._landings: dict[int, _Landing] = {}

    @property
    def is_landing(self) -> bool:
        """Whether the peer may still write to memory that was granted."""
        return bool(self._landings)

    def give_up(self) -> None:
        """The queue pair is gone: granted payloads will not come, unhandled messages will come again."""
        self.generation += 1
        self._landings.clear()
        self._arrived = self.handled
        # The peer must get an answer to every offer that was admitted, but must not write to these places.
        self.replies = [Grant(reply.offer, 0, 0) for reply in self.replies]

    def message_came(self) -> None:
        """Note that the peer wrote the next message; raises FrameError if there was no room for it."""
        self._arrived += 1
        if self._arrived - self.handled > self._slots:
            raise FrameError("the peer wrote more messages than there are slots")

    def handle(self) -> None:
        """Handle the messages that have come, in order, up to a frame that has to wait.

        Raises FrameError if they are no valid messages.
        """
        generation = self.generation
        while self.handled < self._arrived and not self.paused and self.generation == generation:
            start = self.handled % self._slots * self._slot_nbytes
            self._handle(self._ring[start : start + self._slot_nbytes])

    def landed(self, offers: range) -> None:
        """Take in these payloads, which are complete; raises FrameError if they were not granted."""
        generation = self.generation
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
            if self.generation != generation:
                return  # the other payloads are discarded

    def _handle(self, slot: memoryview) -> None:
        """Handle the next message, from `_item` on."""
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
        """The answer of `admit`; None if the frame must wait, or if `admit` ended or fenced all."""
        generation = self.generation
        verdict = self._admit(header)
        if self.generation != generation:
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
        """Ask `admit` for the payload's place and grant it; return whether the offer is answered."""
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
