"""One link over RDMA: frames out of the link's queue into the peer's memory, and from there to the handler.

A connection owns the authenticated stream, over which queue pairs are set up, and one queue pair at a time.

    sender                                       receiver
    small frame:  copied into a slot, written  -> admitted, copied to where `admit` said
    other frame:  OFFER (its header)           -> admitted, `admit` gives a view
                  written straight from where    <- GRANT (address and key of that view, or of memory of
                  it lies to where it belongs  ->   our own if the view is not in registered memory)

Slots are a ring in the receiver's memory; the sender keeps what it wrote until the receiver has handled it.
How many are handled goes back with every message, so a ring is never overrun.

**Fence.** Memory that was granted must not be written after `fence`, and memory that is being sent must not
be read. If any is, the queue pair is destroyed, which stops the NIC, and both sides make a new one: its
*generation* is one higher. Messages that the peer had not handled are written again, so no frame on its way
in a slot is lost, and grants of an older generation are not used. What had been granted goes nowhere, as
`Transport.fence` says.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from bml.protocol.frame import HEADER_NBYTES, FrameError, Header, unpack
from bml.transport.control import MessageStream
from bml.transport.interface import LostKind, Verdict
from bml.transport.memory import Array, RegisteredPool
from bml.transport.poller import READ, Poller, Timer
from bml.transport.sendqueue import Counters, SendQueue
from bml.transport.verbs import rdma, wire
from bml.transport.verbs.rdma import Completion, Nic, QueuePair
from bml.transport.verbs.settings import VerbsSettings
from bml.transport.verbs.wire import Grant, Greeting, Imm, Slot
from topology.errors import InvariantError

_LOG = logging.getLogger("bml.transport")

MAX_OFFERS = 32
"""Payloads of one link that are offered and not written completely."""
_SPARE_SLOTS = 4
"""Slots that frames and offers leave free, so that grants are not kept waiting by them."""
_SPARE_REQUESTS = 16
"""Work requests beyond the slots and payloads: credits, and some air."""
_NOTIFY_NBYTES = 256 << 10
"""The receiver is told of payloads after this much at the latest; each time costs it a wake-up."""
_POLL = 64
_PASS = 256
"""Completions handled in one pass of the poller."""
_MAX_GREETING_NBYTES = 256
_SEND = 1 << 32
"""Added to the number of a write request to tell its completion from a receive's."""


class _Frame(NamedTuple):
    """A frame of ours that was offered."""

    head: bytes
    payload: memoryview


class _Landing(NamedTuple):
    """A frame of the peer's that was granted: where it belongs, and where it is written if not there."""

    header: Header
    view: memoryview
    bounce: Array | None


class _Write(NamedTuple):
    """A payload that was given to the NIC; what is referred to here must stay as it is."""

    request: int
    frame: _Frame
    source: memoryview | Array


class VerbsConnection:
    """See the module's text; the methods are those of `bml.transport.link.LinkConnection`."""

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        queue: SendQueue,
        counters: Counters,
        *,
        nic: Nic,
        nic_number: int,
        pool: RegisteredPool,
        settings: VerbsSettings,
        max_nbytes: int,
        connect_s: float,
        admit: Callable[[Header], memoryview | Verdict],
        received: Callable[[Header], None],
        heard: Callable[[], None],
        on_end: Callable[[LostKind, str], None],
    ) -> None:
        self._poller = poller
        self._queue = queue
        self._counters = counters
        self._nic = nic
        self._nic_number = nic_number
        self._pool = pool
        self._settings = settings
        self._max_nbytes = max_nbytes
        self._connect_s = connect_s
        self._admit = admit
        self._received = received
        self._heard = heard
        self._on_end = on_end
        self._stream = MessageStream(
            sock,
            poller,
            SendQueue(Counters()),
            _MAX_GREETING_NBYTES,
            self._greeted,
            self._stream_ended,
            lambda why: self._end("malformed", why),
        )
        slots, slot_nbytes = settings.slots, settings.slot_nbytes
        ring_nbytes = slots * slot_nbytes
        self._memory = pool.empty(2 * ring_nbytes, "uint8")
        self._ring = self._memory.data[:ring_nbytes]  # the peer writes
        self._outbox = self._memory.data[ring_nbytes:]  # we write, and the NIC reads
        located = pool.find(self._ring)
        assert located is not None
        self._ring_address = located.address
        self._ring_key = located.registrations[nic_number]
        self._outbox_address = located.address + ring_nbytes
        requests = slots + MAX_OFFERS + 2 * _SPARE_REQUESTS
        self._depth = rdma.Depth(sends=requests, receives=requests)
        self._signal_every = max(1, slots // 4)

        self._pair: QueuePair | None = None
        self._generation = 0
        self._hello: Greeting | None = None
        self._is_open = True
        self._muted = False
        self._ready = False
        self._peer_is_ready = False
        self._deadline: Timer | None = None
        self._pump_is_due = False
        self._resume_is_due = False
        self.paused = False
        """A frame waits for `admit` to say something else than WAIT."""

        # Sending: slots, by number since the connection was made; the outbox holds those from `_handled` on.
        self._filled = 0
        self._written = 0
        self._handled = 0
        self._lengths = [0] * slots
        # Sending: work requests of this queue pair.
        self._requests = 0
        self._completed = 0
        self._signaled = 0
        # Sending: payloads.
        self._offers = 0
        self._offered: dict[int, _Frame] = {}
        self._granted: deque[tuple[_Frame, Grant]] = deque()
        self._writes: deque[_Write] = deque()
        self._pending_nbytes = 0
        self._posted_nbytes = 0
        # Receiving.
        self._arrived = 0
        self._done = 0
        self._item = 0
        self._credited = 0
        self._landings: dict[int, _Landing] = {}
        self._grants: list[Grant] = []
        self._cancels: list[int] = []
        self._reposts = 0

    # --- what a link asks -------------------------------------------------------------------------

    def start(self) -> None:
        """Make a queue pair and greet the peer."""
        self._stream.start()
        self._begin()

    @property
    def is_ready(self) -> bool:
        """Whether frames can move."""
        return self._ready and self._peer_is_ready

    @property
    def pending(self) -> tuple[int, int]:
        """(frames, nbytes) taken from the queue and not sent yet."""
        return len(self._offered) + len(self._granted) + len(self._writes), self._pending_nbytes

    def send(self, priority: int, head: bytes, payload: memoryview | None) -> None:
        """Queue one frame."""
        self._queue.push(priority, head, payload)
        if self._muted:
            self._queue.swallow()
        else:
            self._pump_soon()

    def resume(self) -> None:
        """Ask for the frame again that was told to wait, before the poller next waits."""
        if self.paused and not self._resume_is_due:
            self._resume_is_due = True
            self._poller.soon(self._resume)

    def fence(self) -> None:
        """Use no buffer of the old epoch any more; see the module's text."""
        self._queue.clear()
        dropped = [*self._offered.values(), *(frame for frame, _ in self._granted)]
        self._pending_nbytes -= sum(_nbytes(frame) for frame in dropped)
        self._offered.clear()
        self._cancels += [grant.offer for _, grant in self._granted]
        self._granted.clear()
        if self._writes or self._landings:
            self._leave_generation()
            if not self._muted:
                self._generation += 1
                self._begin()

    def mute(self) -> None:
        """Neither send nor notice anything until `unmute`; what the NIC has been given it may still do."""
        if self._muted or not self._is_open:
            return
        self._muted = True
        self._stream.mute()
        self._queue.swallow()
        if self._pair is not None:
            self._poller.remove(self._pair.fd)

    def unmute(self) -> None:
        """End `mute`."""
        if not self._muted or not self._is_open:
            return
        self._muted = False
        self._stream.unmute()
        if self._pair is None:
            self._generation += 1
            self._begin()
        elif self.is_ready:
            self._poller.add(self._pair.fd, READ, self._completions_came)
            self._poller.soon(self._poll)
        else:
            self._end_soon("timeout", "silenced while its queue pair was being made")
        self.resume()
        self._pump_soon()

    def detach(self) -> socket.socket | None:
        """End without a word and hand over the stream's socket."""
        sock = self._stream.detach()
        self._stop()
        return sock

    def close(self) -> None:
        """End without a word."""
        self._stream.close()
        self._stop()

    # --- setting up -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make this generation's queue pair and say so."""
        settings = self._settings
        reliability = rdma.Reliability(settings.timeout, settings.retries, settings.traffic_class)
        if self._deadline is None:
            self._deadline = self._poller.after(self._connect_s, self._too_late)
        try:
            pair = self._nic.queue_pair(self._depth, reliability)
            pair.post_receives(self._depth.receives)
        except OSError as error:
            self._end_soon("timeout", f"cannot make a queue pair: {error}")
            return
        self._pair = pair
        self._poller.add(pair.fd, READ, self._completions_came)
        pair.arm(has_event=False)
        self._arrived = self._done
        self._requests = self._completed = self._signaled = self._reposts = 0
        self._posted_nbytes = 0
        self._peer_is_ready = False
        hello = Greeting(
            self._generation,
            pair.address,
            self._ring_address,
            self._ring_key.rkey,
            settings.slots,
            settings.slot_nbytes,
            self._done,
        )
        self._credited = self._done
        self._say(wire.pack_hello(hello))

    def _say(self, message: bytes) -> None:
        self._stream.queue.push(0, len(message).to_bytes(4, "big") + message, None)
        self._stream.flush_soon()

    def _greeted(self, message: bytes) -> None:
        try:
            greeting = wire.unpack_greeting(message)
            if isinstance(greeting, int):
                self._peer_is_ready = self._peer_is_ready or greeting == self._generation
                self._check_ready()
            else:
                self._take_hello(greeting)
        except FrameError as error:
            self._end("malformed", str(error))

    def _take_hello(self, hello: Greeting) -> None:
        settings = self._settings
        if (hello.slots, hello.slot_nbytes) != (settings.slots, settings.slot_nbytes):
            raise FrameError(
                f"the peer has {hello.slots} slots of {hello.slot_nbytes} bytes, we have {settings.slots} of "
                f"{settings.slot_nbytes}; give BML_RDMA_SLOTS and BML_RDMA_SLOT_NBYTES alike everywhere"
            )
        if hello.generation < self._generation:
            return  # it crossed our own of a later generation, which the peer will answer
        if not self._handled <= hello.handled <= self._filled:
            raise FrameError(f"the peer handled {hello.handled} messages, {self._filled} were written")
        if hello.generation > self._generation:
            self._leave_generation()
            self._generation = hello.generation
            self._begin()
        if self._pair is None or self._ready:
            return
        try:
            self._pair.connect(hello.address)
        except OSError as error:
            self._end("timeout", f"cannot connect the queue pair: {error}{self._trouble()}")
            return
        self._hello = hello
        self._handled = self._written = hello.handled
        self._ready = True
        self._say(wire.pack_ready(self._generation))
        self._check_ready()

    def _check_ready(self) -> None:
        if self.is_ready:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
            self._pump_soon()

    def _leave_generation(self) -> None:
        """Destroy the queue pair; from here on its NIC touches no memory for it."""
        self._drop_pair()
        self._ready = self._peer_is_ready = False
        self._hello = None
        for write in self._writes:
            self._sent(write.frame)
        for frame, _ in self._granted:
            self._sent(frame)
        self._writes.clear()
        self._granted.clear()
        self._landings.clear()
        # The peer must hear of every offer that was admitted, but these places are not to be written.
        self._grants = [Grant(grant.offer, 0, 0) for grant in self._grants]

    def _drop_pair(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            self._poller.remove(pair.fd)
            pair.close()

    # --- the end ----------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._is_open = False
        self._drop_pair()
        self._ready = False
        self.paused = False
        if self._deadline is not None:
            self._deadline.cancel()
        self._offered.clear()
        self._granted.clear()
        self._writes.clear()
        self._landings.clear()
        self._pending_nbytes = 0

    def _end(self, kind: LostKind, why: str) -> None:
        if self._is_open:
            self.close()
            self._on_end(kind, why)

    def _end_soon(self, kind: LostKind, why: str) -> None:
        self._poller.soon(lambda: self._end(kind, why))

    def _stream_ended(self, kind: LostKind, why: str) -> None:
        # What the peer wrote before it closed is here already.
        if self._is_open and self._pair is not None and not self._muted:
            self._poll()
        self._end(kind, why)

    def _too_late(self) -> None:
        self._deadline = None
        if not self._muted:  # a silenced NIC shows no sign; `unmute` will look
            self._end("timeout", f"no queue pair within {self._connect_s:g} s{self._trouble()}")

    def _trouble(self) -> str:
        trouble = self._nic.trouble()
        return f" ({trouble})" if trouble else ""

    # --- completions ------------------------------------------------------------------------------

    def _completions_came(self, events: int) -> None:
        assert self._pair is not None
        try:
            self._pair.arm(has_event=True)
        except OSError as error:
            self._end("timeout", f"the completion channel failed: {error}{self._trouble()}")
            return
        self._poll()

    def _poll(self) -> None:
        pair = self._pair
        if pair is None or self._muted:
            return
        heard = False
        for _ in range(_PASS // _POLL):
            try:
                completions = pair.poll(_POLL)
            except OSError as error:
                self._end("timeout", f"the completion queue failed: {error}{self._trouble()}")
                return
            if completions and not heard:
                heard = True
                if any(each.wr_id < _SEND and each.status == rdma.SUCCESS for each in completions):
                    self._heard()
            for completion in completions:
                if self._pair is not pair:
                    return
                try:
                    self._take(completion)
                except FrameError as error:
                    self._end("malformed", str(error))
                    return
            if len(completions) < _POLL:
                break
        else:
            self._poller.soon(self._poll)
        if self._pair is pair:
            self._handle_messages()
        if self._pair is pair:
            self._pump()

    def _take(self, completion: Completion) -> None:
        if completion.status != rdma.SUCCESS:
            self._failed(completion)
        elif completion.wr_id >= _SEND:
            self._completed = completion.wr_id - _SEND
            while self._writes and self._writes[0].request <= self._completed:
                write = self._writes.popleft()
                self._posted_nbytes -= len(write.frame.payload)
                self._sent(write.frame)
        else:
            self._reposts += 1
            kind, value = wire.unpack_imm(completion.imm)
            if kind == Imm.DONE:
                self._landed(wire.unpack_done(value))
            elif kind in (Imm.RING, Imm.CREDIT):
                self._arrived += kind == Imm.RING
                if self._arrived - self._done > self._settings.slots:
                    raise FrameError("the peer wrote more messages than there are slots")
                self._handled = wire.advance(self._handled, value)
                if self._handled > self._written:
                    raise FrameError(f"the peer handled {self._handled} messages of {self._written}")
            else:
                raise FrameError(f"immediate value {completion.imm:#x}")

    def _failed(self, completion: Completion) -> None:
        text = rdma.STATUS_TEXT.get(completion.status, "work request failed")
        silent = completion.status in (rdma.RETRIES_EXCEEDED, rdma.RNR_RETRIES_EXCEEDED)
        why = f"{text} (status {completion.status}){self._trouble()}"
        self._end("timeout" if silent else "reset", why)

    # --- receiving --------------------------------------------------------------------------------

    def _resume(self) -> None:
        self._resume_is_due = False
        if self._is_open and not self._muted:
            self.paused = False
            self._handle_messages()
            self._pump()

    def _handle_messages(self) -> None:
        """Handle the messages that are there in their order, up to a frame that has to wait."""
        slots, slot_nbytes, pair = self._settings.slots, self._settings.slot_nbytes, self._pair
        try:
            # The handler may fence or close from inside: what is left is written again, or nobody's.
            while self._done < self._arrived and not self.paused and self._pair is pair:
                start = self._done % slots * slot_nbytes
                self._handle(self._ring[start : start + slot_nbytes])
        except FrameError as error:
            self._end("malformed", str(error))

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
            self._take_grants(*wire.read_grants(slot, count))
        elif kind == Slot.CANCELS:
            for offer in wire.read_cancels(slot, count):
                self._landings.pop(offer & wire.OFFER_MASK, None)
        else:
            raise FrameError(f"message of kind {kind} in a slot")
        self._message_is_done()

    def _message_is_done(self) -> None:
        self._done += 1
        self._item = 0

    def _ask(self, header: Header) -> memoryview | Verdict | None:
        """What `admit` says; None if the frame is to be asked for again, or never."""
        pair = self._pair
        verdict = self._admit(header)
        if self._pair is not pair:
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
        header = unpack(slot, wire.HEAD.size, self._settings.slot_nbytes - wire.FRAME_OVERHEAD_NBYTES)
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
            self._grants.append(Grant(number, 0, 0))
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
        self._grants.append(Grant(number, located.registrations[self._nic_number].rkey, located.address))
        return True

    def _landed(self, offers: range) -> None:
        """These payloads are complete."""
        pair = self._pair
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
            if self._pair is not pair:
                return  # fenced or closed from inside: the others go nowhere

    # --- sending ----------------------------------------------------------------------------------

    def _take_grants(self, generation: int, grants: Iterable[Grant]) -> None:
        for grant in grants:
            frame = self._offered.pop(grant.offer, None)
            if frame is None:
                if grant.rkey and generation == self._generation:
                    self._cancels.append(grant.offer)
            elif grant.rkey and generation == self._generation:
                self._granted.append((frame, grant))
            else:
                self._sent(frame)  # dropped by the receiver, or cut off by a fence

    def _sent(self, frame: _Frame) -> None:
        self._pending_nbytes -= _nbytes(frame)
        self._counters.frames_sent += 1
        self._counters.nbytes_sent += _nbytes(frame)

    def _pump_soon(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            self._poller.soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pump_is_due = False
        self._pump()

    def _pump(self) -> None:
        """Write all that may be written now."""
        if not self._is_open or not self.is_ready or self._muted:
            return
        assert self._pair is not None
        try:
            if self._reposts >= _SPARE_REQUESTS:
                self._pair.post_receives(self._reposts)
                self._reposts = 0
            self._write_slots()  # of a generation before
            self._write_payloads()
            self._fill_replies()
            self._fill_frames()
            self._write_slots()
            self._write_credit()
        except OSError as error:
            self._end_soon("reset", f"cannot post a work request: {error}{self._trouble()}")

    @property
    def _room(self) -> int:
        return self._settings.slots - (self._filled - self._handled)

    @property
    def _requests_left(self) -> int:
        return self._depth.sends - (self._requests - self._completed)

    def _write_payloads(self) -> None:
        """Give to the NIC what the window allows, and tell the peer of several payloads at once."""
        window = self._settings.window_nbytes
        untold, untold_nbytes = 0, 0
        while self._granted and self._requests_left > 1:
            frame, grant = self._granted[0]
            nbytes = len(frame.payload)
            if self._writes and self._posted_nbytes + nbytes > window:
                return
            self._granted.popleft()
            self._posted_nbytes += nbytes
            untold_nbytes += nbytes
            following = self._granted[0] if self._granted else None
            tell = (
                following is None
                or following[1].offer != grant.offer + 1
                or untold_nbytes >= _NOTIFY_NBYTES
                or self._posted_nbytes + len(following[0].payload) > window
                or self._requests_left <= 2
            )
            source, local = self._source(frame.payload)
            imm = wire.pack_done(grant.offer, untold) if tell else None
            self._post(local, (grant.rkey, grant.address), imm, signaled=tell)
            self._writes.append(_Write(self._requests, frame, source))
            untold, untold_nbytes = (0, 0) if tell else (untold + 1, untold_nbytes)

    def _source(self, payload: memoryview) -> tuple[memoryview | Array, tuple[int, int, int]]:
        """What to send in place of a payload, itself if it can be, and (lkey, address, nbytes) of that."""
        source: memoryview | Array = payload
        located = self._pool.find(payload)
        if located is None:
            source = self._pool.empty(len(payload), "uint8")
            source.data[:] = payload
            self._counters.nbytes_copied_sent += len(payload)
            located = self._pool.find(source)
            assert located is not None
        return source, (located.registrations[self._nic_number].lkey, located.address, len(payload))

    def _fill_replies(self) -> None:
        slot_nbytes = self._settings.slot_nbytes
        while self._grants and self._room:
            most = wire.most_grants(slot_nbytes)
            some, self._grants = self._grants[:most], self._grants[most:]
            self._fill(wire.pack_grants(self._generation, some))
        while self._cancels and self._room:
            most = wire.most_cancels(slot_nbytes)
            gone, self._cancels = self._cancels[:most], self._cancels[most:]
            self._fill(wire.pack_cancels(gone))

    def _fill_frames(self) -> None:
        """Small frames into slots, the headers of others into offers, by priority."""
        queue, counters = self._queue, self._counters
        most_nbytes = self._settings.slot_nbytes - wire.FRAME_OVERHEAD_NBYTES
        offers: list[tuple[int, bytes]] = []
        while self._room - bool(offers) > _SPARE_SLOTS:
            waiting = queue.peek()
            if waiting is None:
                break
            head, payload = waiting[2], waiting[3]
            if payload is None or len(payload) <= most_nbytes:
                queue.pop()
                self._flush_offers(offers)
                self._fill(wire.HEAD.pack(Slot.FRAME, 1), head, payload)
                nbytes = 0 if payload is None else len(payload)
                counters.frames_sent += 1
                counters.nbytes_sent += len(head) + nbytes
                counters.nbytes_copied_sent += nbytes
            elif self._may_offer(len(payload)):
                queue.pop()
                self._offers += 1
                self._offered[self._offers] = frame = _Frame(head, payload)
                self._pending_nbytes += _nbytes(frame)
                offers.append((self._offers, head))
                if len(offers) == wire.most_offers(self._settings.slot_nbytes):
                    self._flush_offers(offers)
            else:
                break
        self._flush_offers(offers)

    def _may_offer(self, nbytes: int) -> bool:
        under_way = len(self._offered) + len(self._granted) + len(self._writes)
        # Two at least, so that one is on its way while the other is being granted.
        few = self._pending_nbytes + nbytes <= 2 * self._settings.window_nbytes
        return under_way < 2 or (under_way < MAX_OFFERS and few)

    def _flush_offers(self, offers: list[tuple[int, bytes]]) -> None:
        if offers:
            self._fill(wire.pack_offers(offers))
            offers.clear()

    def _fill(self, message: bytes, head: bytes = b"", payload: memoryview | None = None) -> None:
        """Put a message into the next slot of the outbox."""
        slots, slot_nbytes = self._settings.slots, self._settings.slot_nbytes
        start = self._filled % slots * slot_nbytes
        stop = start + len(message)
        self._outbox[start:stop] = message
        for part in (head, payload):
            if part:
                self._outbox[stop : stop + len(part)] = part
                stop += len(part)
        self._lengths[self._filled % slots] = stop - start
        self._filled += 1

    def _write_slots(self) -> None:
        hello = self._hello
        assert hello is not None
        slots, slot_nbytes = self._settings.slots, self._settings.slot_nbytes
        while self._written < self._filled and self._requests_left > 1:
            index = self._written % slots
            local = (self._ring_key.lkey, self._outbox_address + index * slot_nbytes, self._lengths[index])
            self._written += 1
            remote = (hello.ring_rkey, hello.ring_address + index * slot_nbytes)
            self._post(local, remote, wire.pack_imm(Imm.RING, self._done))
            self._credited = self._done

    def _write_credit(self) -> None:
        """Say how much was handled, if no message has said it for long."""
        hello = self._hello
        if (
            hello is None
            or self._done - self._credited < self._settings.slots // 4
            or self._requests_left <= 1
        ):
            return
        self._credited = self._done
        local = (self._ring_key.lkey, self._outbox_address, 0)
        imm = wire.pack_imm(Imm.CREDIT, self._done)
        self._post(local, (hello.ring_rkey, hello.ring_address), imm)

    def _post(
        self,
        local: tuple[int, int, int],
        remote: tuple[int, int],
        imm: int | None,
        signaled: bool = False,
    ) -> None:
        assert self._pair is not None
        self._requests += 1
        # Requests complete in order, so one completion stands for all before it.
        signaled = signaled or self._requests - self._signaled >= self._signal_every
        if signaled:
            self._signaled = self._requests
        self._pair.write(_SEND + self._requests, local, remote, imm, signaled)


def _nbytes(frame: _Frame) -> int:
    return len(frame.head) + len(frame.payload)


def _flat(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
