"""One connection of the verbs transport: the link's stream, and one queue pair at a time.

The package's text says how frames move. This module sets queue pairs up over the stream, takes completions,
and hands them to the two halves, `Outgoing` and `Incoming`. At a fence it leaves a generation.
"""

from __future__ import annotations

import socket

from bml.io.poller import READ, Poller, Timer
from bml.io.sendqueue import Counters, SendQueue
from bml.protocol.wire.frame import FrameError
from bml.transport.handshake.control import MessageStream
from bml.transport.interface import LostKind
from bml.transport.links.link import Link, LinkCallbacks
from bml.transport.links.settings import LinkSettings
from bml.transport.verbs import rdma, wire
from bml.transport.verbs.incoming import MAX_OFFERS, Incoming
from bml.transport.verbs.outgoing import SEND, Outgoing
from bml.transport.verbs.rdma import Completion, Nic, NicMemory, QueuePair
from bml.transport.verbs.settings import VerbsSettings
from bml.transport.verbs.wire import Imm, PairHello

_SPARE_REQUESTS = 16
"""Work requests beyond those of slots and payloads: credits, and some spare ones."""
_POLL = 64
_PASS = 256
"""The most completions that are handled in one pass of the poller."""
_MAX_SETUP_NBYTES = 256


class VerbsConnection:
    """A `bml.transport.links.link.LinkConnection` over RDMA; `links` are the settings of all links."""

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        link: Link,
        callbacks: LinkCallbacks,
        nic: Nic,
        memory: NicMemory,
        settings: VerbsSettings,
        links: LinkSettings,
    ) -> None:
        self._poller = poller
        self._queue = link.queue
        self._nic = nic
        self._settings = settings
        self._connect_s = links.connect_s
        self._reliability = rdma.Reliability(settings.timeout, settings.retries, links.traffic_class)
        admit, received, self._heard, self._on_end = callbacks
        self._stream = MessageStream(
            sock,
            poller,
            SendQueue(Counters()),
            _MAX_SETUP_NBYTES,
            self._setup_came,
            self._stream_ended,
            lambda why: self._end("malformed", why),
        )
        slots, ring_nbytes = settings.slots, settings.slots * settings.slot_nbytes
        both = memory.pool.empty(2 * ring_nbytes, "uint8")
        ring, outbox = both.data[:ring_nbytes], both.data[ring_nbytes:]
        located = memory.pool.find(ring)
        assert located is not None
        self._ring_address = located.address
        self._ring_rkey = located.registrations[memory.nic_number].rkey
        requests = slots + MAX_OFFERS + 2 * _SPARE_REQUESTS
        self._depth = rdma.Depth(sends=requests, receives=requests)
        counters, window_nbytes = link.counters, settings.window_nbytes
        self._outgoing = Outgoing(outbox, slots, memory, link.queue, counters, window_nbytes, requests)
        granted = self._outgoing.take_grants
        self._incoming = Incoming(ring, slots, memory, counters, links.max_nbytes, admit, received, granted)
        self._pair: QueuePair | None = None
        self._generation = 0
        self._reposts = 0
        self._is_open = True
        self._muted = False
        self._ready = False
        self._peer_is_ready = False
        self._deadline: Timer | None = None
        self._pump_is_due = False
        self._resume_is_due = False

    # --- the methods of LinkConnection ------------------------------------------------------------

    def start(self) -> None:
        """Make a queue pair and send its HELLO to the peer."""
        self._stream.start()
        self._begin()

    @property
    def is_ready(self) -> bool:
        """Whether frames can move."""
        return self._ready and self._peer_is_ready

    @property
    def pending(self) -> tuple[int, int]:
        """(frames, nbytes) taken from the queue and not sent yet."""
        return self._outgoing.pending

    def send(self, priority: int, head: bytes, payload: memoryview | None) -> None:
        """Queue one frame."""
        self._queue.push(priority, head, payload)
        if not self._muted:
            self._pump_soon()

    def resume(self) -> None:
        """Ask `admit` again for the frame that waits, before the poller next waits."""
        if self._incoming.paused and not self._resume_is_due:
            self._resume_is_due = True
            self._poller.soon(self._resume)

    def fence(self) -> None:
        """Use no buffer of the old epoch any more; see the package's text."""
        self._outgoing.forget()
        if self._outgoing.is_writing or self._incoming.is_landing:
            self._leave_generation()
            if not self._muted:
                self._generation += 1
                self._begin()

    def mute(self) -> None:
        """Neither send nor notice anything until `unmute`; the NIC may still complete its work requests.

        Queued frames stay queued. They are sent when the NIC works again, unless a fence drops them before.
        """
        if self._muted or not self._is_open:
            return
        self._muted = True
        self._stream.mute()
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
        else:
            self._poller.add(self._pair.fd, READ, self._completions_came)
            self._poller.soon(self._poll)
            if not self.is_ready and self._deadline is None:
                self._deadline = self._poller.after(self._connect_s, self._too_late)
        self.resume()
        self._pump_soon()

    def detach(self) -> socket.socket | None:
        """End without calling `end`, and return the stream's socket."""
        sock = self._stream.detach()
        self._stop()
        return sock

    def close(self) -> None:
        """End without calling `end`."""
        self._stream.close()
        self._stop()

    # --- setting up -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make the queue pair of this generation and send its HELLO."""
        settings = self._settings
        if self._deadline is None:
            self._deadline = self._poller.after(self._connect_s, self._too_late)
        try:
            pair = self._nic.queue_pair(self._depth, self._reliability)
            pair.post_receives(self._depth.receives)
        except OSError as error:
            self._end_soon("timeout", f"cannot make a queue pair: {error}")
            return
        self._pair = pair
        self._poller.add(pair.fd, READ, self._completions_came)
        pair.arm(has_event=False)
        self._reposts = 0
        self._peer_is_ready = False
        hello = PairHello(
            self._generation,
            pair.address,
            self._ring_address,
            self._ring_rkey,
            settings.slots,
            settings.slot_nbytes,
            self._incoming.handled,
        )
        self._say(wire.pack_hello(hello))

    def _say(self, message: bytes) -> None:
        self._stream.queue.push(0, len(message).to_bytes(4, "big") + message, None)
        self._stream.flush_soon()

    def _setup_came(self, message: bytes) -> None:
        try:
            setup = wire.unpack_setup(message)
            if isinstance(setup, int):
                self._peer_is_ready = self._peer_is_ready or setup == self._generation
                self._check_ready()
            else:
                self._take_hello(setup)
        except FrameError as error:
            self._end("malformed", str(error))

    def _take_hello(self, hello: PairHello) -> None:
        settings = self._settings
        if (hello.slots, hello.slot_nbytes) != (settings.slots, settings.slot_nbytes):
            raise FrameError(
                f"the peer has {hello.slots} slots of {hello.slot_nbytes} bytes, this server has "
                f"{settings.slots} of {settings.slot_nbytes}; give BML_RDMA_SLOTS and BML_RDMA_SLOT_NBYTES "
                "the same values everywhere"
            )
        if hello.generation < self._generation:
            return  # this side has sent the HELLO of a later generation meanwhile, which the peer will answer
        self._outgoing.check(hello.handled)
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
        self._outgoing.begin(self._pair, hello, self._incoming.handled)
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
        """Destroy the queue pair; afterwards the NIC neither reads nor writes memory for it."""
        self._drop_pair()
        self._ready = self._peer_is_ready = False
        self._outgoing.give_up()
        self._incoming.give_up()

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
        if self._deadline is not None:
            self._deadline.cancel()
        self._incoming.give_up()
        self._incoming.paused = False
        self._outgoing.stop()

    def _end(self, kind: LostKind, why: str) -> None:
        if self._is_open:
            self.close()
            self._on_end(kind, why)

    def _end_soon(self, kind: LostKind, why: str) -> None:
        self._poller.soon(lambda: self._end(kind, why))

    def _stream_ended(self, kind: LostKind, why: str) -> None:
        # Messages that the peer wrote before it closed have arrived already.
        if self._is_open and self._pair is not None and not self._muted:
            self._poll()
        self._end(kind, why)

    def _too_late(self) -> None:
        self._deadline = None
        if not self._muted:  # a silenced NIC reports nothing; `unmute` starts the time limit again
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
                if any(each.wr_id < SEND and each.status == rdma.SUCCESS for each in completions):
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
        elif completion.wr_id >= SEND:
            self._outgoing.completed(completion.wr_id)
        else:
            self._reposts += 1
            kind, value = wire.unpack_imm(completion.imm)
            if kind == Imm.DONE:
                self._incoming.landed(wire.unpack_done(value))
            elif kind in (Imm.RING, Imm.CREDIT):
                if kind == Imm.RING:
                    self._incoming.message_came()
                self._outgoing.acknowledged(value)
            else:
                raise FrameError(f"immediate value {completion.imm:#x}")

    def _failed(self, completion: Completion) -> None:
        text = rdma.STATUS_TEXT.get(completion.status, "work request failed")
        silent = completion.status in (rdma.RETRIES_EXCEEDED, rdma.RNR_RETRIES_EXCEEDED)
        why = f"{text} (status {completion.status}){self._trouble()}"
        self._end("timeout" if silent else "reset", why)

    def _handle_messages(self) -> None:
        try:
            self._incoming.handle()
        except FrameError as error:
            self._end("malformed", str(error))

    def _resume(self) -> None:
        self._resume_is_due = False
        if self._is_open and not self._muted:
            self._incoming.paused = False
            self._handle_messages()
            self._pump()

    # --- sending ----------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            self._poller.soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pump_is_due = False
        self._pump()

    def _pump(self) -> None:
        """Write all that may be written now."""
        if self._pair is None or not self.is_ready or self._muted:
            return
        try:
            if self._reposts >= _SPARE_REQUESTS:
                self._pair.post_receives(self._reposts)
                self._reposts = 0
            self._outgoing.pump(self._incoming.replies, self._incoming.handled)
        except OSError as error:
            self._end_soon("reset", f"cannot post a work request: {error}{self._trouble()}")
