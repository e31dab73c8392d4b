"""The sending half of a verbs connection: frames of the link's queue become messages and remote writes.

The states of a frame:

    waiting   it is in the link's queue, by priority
    offered   its header is in a message; a frame that fits into a slot is sent as a message and is done
    granted   the receiver has answered with the place of the payload
    written   the NIC has it; it is done when all of it is acknowledged
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from bml.io.memory import Array
from bml.io.sendqueue import Counters, SendQueue
from bml.protocol.wire.frame import FrameError
from bml.transport.verbs import wire
from bml.transport.verbs.incoming import MAX_OFFERS
from bml.transport.verbs.rdma import NicMemory, QueuePair, Write
from bml.transport.verbs.wire import Grant, Imm, PairHello, Slot

SEND = 1 << 32
"""Added to the number of a write request, so that its completion differs from that of a receive."""
_SPARE_SLOTS = 4
"""The slots that frames and offers leave free, so that grants need not wait for them."""
_NOTIFY_NBYTES = 256 << 10
"""After so many bytes of payload, or a quarter of the window, the receiver is notified, and the NIC reports a
completion. Each notification costs a wake-up."""


class _Frame:
    """A frame that was offered, and its state.

    `payload`, and `source` that is sent in its place, must not change while the NIC has them.
    """

    __slots__ = ("address", "nbytes", "offer", "payload", "request", "rkey", "size", "source")

    def __init__(self, offer: int, head: bytes, payload: memoryview) -> None:
        self.offer = offer
        self.payload = payload
        self.size = len(payload)
        self.nbytes = len(head) + self.size
        """Bytes of the frame, with its header."""
        self.rkey = self.address = 0
        """The place of the payload in the receiver's memory."""
        self.request = 0
        self.source: memoryview | Array = payload


class Outgoing:
    """The sending half: it turns frames of the link's queue into messages and remote writes.

    Messages are counted since the connection was made, requests since its queue pair was made.
    """

    def __init__(
        self,
        outbox: memoryview,
        slots: int,
        memory: NicMemory,
        queue: SendQueue,
        counters: Counters,
        window_nbytes: int,
        max_requests: int,
    ) -> None:
        self._pool, self._nic_number = pool, nic_number = memory
        located = pool.find(outbox)
        assert located is not None
        self._outbox = outbox
        self._outbox_address = located.address
        self._outbox_lkey = located.registrations[nic_number].lkey
        self._slots = slots
        self._slot_nbytes = len(outbox) // slots
        self._queue = queue
        self._counters = counters
        self._window_nbytes = window_nbytes
        self._notify_nbytes = max(_NOTIFY_NBYTES, window_nbytes // 4)
        self._most_offers = wire.most_offers(self._slot_nbytes)
        self._max_requests = max_requests
        self._signal_every = max(1, slots // 4)
        self._pair: QueuePair | None = None
        self._hello: PairHello | None = None
        # The outbox holds the messages from `_handled` to `_filled`; those before `_written` are written.
        self._filled = 0
        self._written = 0
        self._handled = 0
        self._lengths = [0] * slots
        self._credited = 0
        self._requests = 0
        self._completed = 0
        self._signaled = 0
        self._offers = 0
        self._offered: dict[int, _Frame] = {}
        # Offers that a fence dropped: the peer will answer them, and must be told that no payload comes.
        self._forgotten: set[int] = set()
        self._cancels: list[int] = []
        self._granted: deque[_Frame] = deque()
        self._writes: deque[_Frame] = deque()
        # Requests that are posted to the queue pair together, at the end of `pump`.
        self._batch: list[Write] = []
        self._pending_nbytes = 0
        self.posted_nbytes = 0
        """Bytes of payload that the NIC has, and that are not acknowledged."""

    @property
    def pending(self) -> tuple[int, int]:
        """(frames, nbytes) that were taken from the queue and are not sent yet."""
        return len(self._offered) + len(self._granted) + len(self._writes), self._pending_nbytes

    @property
    def is_writing(self) -> bool:
        """Whether the NIC may read payloads."""
        return bool(self._writes)

    # --- the life of a queue pair -----------------------------------------------------------------

    def check(self, handled: int) -> None:
        """Raise FrameError unless the peer can have handled so many messages."""
        if not self._handled <= handled <= self._filled:
            raise FrameError(f"the peer handled {handled} messages, {self._filled} were written")

    def begin(self, pair: QueuePair, hello: PairHello, credited: int) -> None:
        """Use this queue pair, which is connected; unhandled messages are written again.

        `credited` is the number of handled messages that the peer was told last.
        """
        self._pair, self._hello, self._credited = pair, hello, credited
        self._handled = self._written = hello.handled
        self._requests = self._completed = self._signaled = 0
        self.posted_nbytes = 0

    def give_up(self) -> None:
        """The queue pair is gone: granted payloads are dropped, offers stay offered."""
        self._pair = self._hello = None
        for frame in [*self._writes, *self._granted]:
            self._sent(frame)
        self._writes.clear()
        self._granted.clear()
        self._cancels.clear()

    def forget(self) -> None:
        """Drop every frame that the NIC does not have yet."""
        self._queue.clear()
        for frame in [*self._offered.values(), *self._granted]:
            self._pending_nbytes -= frame.nbytes
        self._forgotten.update(self._offered)
        self._offered.clear()
        self._cancels += [frame.offer for frame in self._granted]
        self._granted.clear()

    def stop(self) -> None:
        """The connection is over."""
        self._pair = None
        self._offered.clear()
        self._granted.clear()
        self._writes.clear()
        self._pending_nbytes = 0

    # --- what the peer and the NIC say ------------------------------------------------------------

    def completed(self, wr_id: int) -> None:
        """The NIC has completed this request and all before it."""
        self._completed = wr_id - SEND
        writes = self._writes
        while writes and writes[0].request <= self._completed:
            frame = writes.popleft()
            self.posted_nbytes -= frame.size
            self._sent(frame)

    def acknowledged(self, low: int) -> None:
        """The peer has handled more messages; `low` are the low bits of their number. Raises FrameError."""
        self._handled = wire.advance(self._handled, low)
        if self._handled > self._written:
            raise FrameError(f"the peer handled {self._handled} messages of {self._written}")

    def take_grants(self, generation: int, grants: Iterable[Grant]) -> None:
        """Take the peer's answers to offers; places from before the present queue pair are not used."""
        now = self._hello is not None and generation == self._hello.generation
        for offer, rkey, address in grants:
            is_place = bool(rkey) and now
            frame = self._offered.pop(offer, None)
            if frame is None:
                self._forgotten.discard(offer)
                if is_place:
                    self._cancels.append(offer)
            elif is_place:
                frame.rkey, frame.address = rkey, address
                self._granted.append(frame)
            else:
                self._sent(frame)  # dropped by the receiver, or by a fence

    # --- writing ----------------------------------------------------------------------------------

    def pump(self, replies: list[Grant], handled: int) -> None:
        """Write all that may be written now, and the replies that fit; raises OSError.

        `handled` is the number of the peer's messages that have been handled.
        """
        self._write_slots(handled)  # those of an earlier generation
        self._fill_replies(replies)
        self._fill_frames()
        # Before payloads, which take long on the wire, so that the peer can answer meanwhile.
        self._write_slots(handled)
        self._write_credit(handled)
        self._write_payloads()
        if self._batch:
            assert self._pair is not None
            batch, self._batch = self._batch, []
            self._pair.post(batch)

    def _sent(self, frame: _Frame) -> None:
        nbytes, counters = frame.nbytes, self._counters
        self._pending_nbytes -= nbytes
        counters.frames_sent += 1
        counters.nbytes_sent += nbytes

    @property
    def _room(self) -> int:
        return self._slots - (self._filled - self._handled)

    @property
    def _requests_left(self) -> int:
        return self._max_requests - (self._requests - self._completed)

    def _write_payloads(self) -> None:
        """Post the payloads that the window allows; the peer is notified of several at once."""
        granted, writes = self._granted, self._writes
        window, notify_nbytes = self._window_nbytes, self._notify_nbytes
        room = self._requests_left - 1
        untold = untold_nbytes = 0
        while granted and room > 0:
            frame = granted[0]
            nbytes = frame.size
            if writes and self.posted_nbytes + nbytes > window:
                return
            granted.popleft()
            room -= 1
            self.posted_nbytes += nbytes
            untold_nbytes += nbytes
            tell = (
                untold_nbytes >= notify_nbytes
                or not granted
                or not room
                or granted[0].offer != frame.offer + 1
                or self.posted_nbytes + granted[0].size > window
            )
            imm = wire.pack_done(frame.offer, untold) if tell else None
            self._post(self._source(frame), (frame.rkey, frame.address), imm, tell)
            frame.request = self._requests
            writes.append(frame)
            untold, untold_nbytes = (0, 0) if tell else (untold + 1, untold_nbytes)

    def _source(self, frame: _Frame) -> tuple[int, int, int]:
        """(lkey, address, nbytes) of the payload, or of a copy if the payload is not in the pool."""
        located = self._pool.find(frame.payload)
        if located is None:
            frame.source = copy = self._pool.empty(frame.size, "uint8")
            copy.data[:] = frame.payload
            self._counters.nbytes_copied_sent += frame.size
            located = self._pool.find(copy)
            assert located is not None
        return located.registrations[self._nic_number].lkey, located.address, frame.size

    def _fill_replies(self, replies: list[Grant]) -> None:
        slot_nbytes, hello = self._slot_nbytes, self._hello
        assert hello is not None
        while replies and self._room:
            most = wire.most_grants(slot_nbytes)
            self._fill(wire.pack_grants(hello.generation, replies[:most]))
            del replies[:most]
        while self._cancels and self._room:
            most = wire.most_cancels(slot_nbytes)
            gone, self._cancels = self._cancels[:most], self._cancels[most:]
            self._fill(wire.pack_cancels(gone))

    def _fill_frames(self) -> None:
        """Put small frames into slots, and the headers of others into offers, by priority."""
        queue, counters = self._queue, self._counters
        most_nbytes = self._slot_nbytes - wire.FRAME_OVERHEAD_NBYTES
        offers: list[tuple[int, bytes]] = []
        while self._room - bool(offers) > _SPARE_SLOTS:
            waiting = queue.peek()
            if waiting is None:
                break
            _, _, head, payload = waiting
            if payload is None or len(payload) <= most_nbytes:
                queue.pop()
                self._flush_offers(offers)
                self._fill(wire.HEAD.pack(Slot.FRAME, 1), head, payload)
                nbytes = 0 if payload is None else len(payload)
                counters.frames_sent += 1
                counters.nbytes_sent += len(head) + nbytes
                counters.nbytes_copied_sent += nbytes
            elif self._may_offer(len(payload), not offers):
                queue.pop()
                number = self._offers = wire.after(self._offers)
                self._offered[number] = frame = _Frame(number, head, payload)
                self._pending_nbytes += frame.nbytes
                offers.append((number, head))
                if len(offers) == self._most_offers:
                    self._flush_offers(offers)
            else:
                break
        self._flush_offers(offers)

    def _may_offer(self, nbytes: int, first: bool) -> bool:
        under_way = len(self._offered) + len(self._granted) + len(self._writes) + len(self._forgotten)
        # At least two, so that one is written while the other is being granted. Many at once, as an offer and
        # its grant wake both sides: after a stop, continue when half of the permitted ones are done.
        if under_way < 2:
            return True
        if first:
            return under_way <= MAX_OFFERS // 2 and self._pending_nbytes + nbytes <= self._window_nbytes
        return under_way < MAX_OFFERS and self._pending_nbytes + nbytes <= 2 * self._window_nbytes

    def _flush_offers(self, offers: list[tuple[int, bytes]]) -> None:
        if offers:
            self._fill(wire.pack_offers(offers))
            offers.clear()

    def _fill(self, message: bytes, head: bytes = b"", payload: memoryview | None = None) -> None:
        """Copy a message into the next slot of the outbox."""
        slots, slot_nbytes = self._slots, self._slot_nbytes
        start = self._filled % slots * slot_nbytes
        stop = start + len(message)
        self._outbox[start:stop] = message
        for part in (head, payload):
            if part:
                self._outbox[stop : stop + len(part)] = part
                stop += len(part)
        self._lengths[self._filled % slots] = stop - start
        self._filled += 1

    def _write_slots(self, handled: int) -> None:
        hello = self._hello
        assert hello is not None
        slots, slot_nbytes = self._slots, self._slot_nbytes
        while self._written < self._filled and self._requests_left > 1:
            index = self._written % slots
            local = (self._outbox_lkey, self._outbox_address + index * slot_nbytes, self._lengths[index])
            self._written += 1
            remote = (hello.ring_rkey, hello.ring_address + index * slot_nbytes)
            self._post(local, remote, wire.pack_imm(Imm.RING, handled))
            self._credited = handled

    def _write_credit(self, handled: int) -> None:
        """Send the number of handled messages, if no message has carried it for long."""
        hello = self._hello
        if hello is None or handled - self._credited < self._slots // 4 or self._requests_left <= 1:
            return
        self._credited = handled
        local = (self._outbox_lkey, self._outbox_address, 0)
        imm = wire.pack_imm(Imm.CREDIT, handled)
        self._post(local, (hello.ring_rkey, hello.ring_address), imm)

    def _post(
        self,
        local: tuple[int, int, int],
        remote: tuple[int, int],
        imm: int | None,
        signaled: bool = False,
    ) -> None:
        self._requests += 1
        # Requests complete in order, so one completion stands for all before it.
        signaled = signaled or self._requests - self._signaled >= self._signal_every
        if signaled:
            self._signaled = self._requests
        self._batch.append(Write(SEND + self._requests, local, remote, imm, signaled))
