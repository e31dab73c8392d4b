"""The verbs transport on NICs in memory: payloads in place, no copies, bounds, fences, everything closed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from descriptors import opened
from fake_rdma import SETTINGS, VerbsWires
from wires import Recorder, header, polled

from bml.protocol.wire.frame import HEADER_NBYTES
from bml.transport import DROP, WAIT, Kind
from bml.transport.verbs.incoming import MAX_OFFERS
from bml.transport.verbs.rdma import Completion
from bml.transport.verbs.settings import VerbsSettings


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = opened()
    yield
    assert opened() <= before


def test_many_random_slices_land_in_place_without_a_copy() -> None:
    rng = random.Random(4)
    cuts = sorted(rng.sample(range(1, 600_000), 300))
    data = rng.randbytes(600_000)
    ranges = list(zip([0, *cuts], [*cuts, len(data)], strict=True))
    rng.shuffle(ranges)
    with VerbsWires(2, 1, nbytes=len(data)) as wires:
        wires.connect()
        source = wires.pooled(0, data)
        for start, stop in ranges:
            wires.transports[0].send(1, 0, header(0, start, stop), source[start:stop], rng.randrange(8))
        receiver = wires.handlers[1]
        wires.until(lambda: len(receiver.frames) == len(ranges), "all slices")
        assert receiver.memory == data
        wires.until(lambda: wires.transports[0].queued_nbytes == 0, "completions")
        stats, other = wires.transports[0].stats()[1, 0], wires.transports[1].stats()[0, 0]
        assert stats.frames_sent == other.frames_received == len(ranges)
        assert stats.nbytes_sent == len(data) + len(ranges) * HEADER_NBYTES
        small = sum(stop - start for start, stop in ranges if stop - start <= 512 - HEADER_NBYTES - 4)
        assert stats.nbytes_copied_sent == other.nbytes_copied_received == small < len(data) / 20
        assert len(wires.wire.pairs) == 2
    assert wires.wire.open == 0


def test_memory_that_is_not_the_pools_costs_one_counted_copy_a_side() -> None:
    data = random.Random(1).randbytes(100_000)
    with VerbsWires(2, 1, nbytes=len(data), pooled=False) as wires:
        wires.connect()
        wires.transports[0].send(1, 0, header(0, 0, len(data)), memoryview(data))
        wires.until(lambda: wires.handlers[1].frames, "the frame")
        assert wires.handlers[1].memory == data
        wires.until(lambda: wires.transports[0].queued_nbytes == 0, "the completion")
        assert wires.transports[0].stats()[1, 0].nbytes_copied_sent == len(data)
        assert wires.transports[1].stats()[0, 0].nbytes_copied_received == len(data)
        pool = wires.transports[0].pool  # type: ignore[attr-defined]
        rings = 2 * SETTINGS.slots * SETTINGS.slot_nbytes
        assert pool.free_nbytes == pool.nbytes - rings, "nothing of the copy is left"


def test_a_window_bounds_what_is_under_way() -> None:
    n, size = 40, 10_000
    with VerbsWires(2, 1, nbytes=n * size) as wires:
        wires.connect()
        source = wires.pooled(0, bytes(n * size))
        connection = wires.transports[0]._links[1, 0].connection
        most_posted = most_offered = 0
        for i in range(n):
            wires.transports[0].send(
                1, 0, header(0, i * size, (i + 1) * size), source[i * size : (i + 1) * size]
            )
        wires.wire.held = True
        while len(wires.handlers[1].frames) < n:
            wires.wire.flow(1)
            wires.poller.poll(0)
            most_posted = max(most_posted, connection._outgoing.posted_nbytes)  # type: ignore[union-attr]
            most_offered = max(most_offered, connection.pending[1])  # type: ignore[union-attr]
        assert SETTINGS.window_nbytes / 2 < most_posted <= SETTINGS.window_nbytes
        assert most_offered <= 2 * SETTINGS.window_nbytes


def test_urgent_frames_overtake_what_waits() -> None:
    size = 50_000
    with VerbsWires(2, 1, nbytes=size) as wires:
        wires.connect()
        wires.wire.held = True
        for step in range(8):
            wires.transports[0].send(1, 0, header(0, 0, size, step=step), wires.pooled(0, bytes(size)), 5)
        polled(wires.poller, 0.01)
        wires.transports[0].send(1, 0, header(Kind.TOKEN, 3), None, 0)
        wires.poller.poll(0)
        wires.wire.held = False
        wires.wire.flow()
        wires.until(lambda: any(f[2].kind == Kind.TOKEN for f in wires.handlers[1].frames), "the token")
        assert len(wires.handlers[1].frames) <= 3


def test_the_ring_is_never_overrun_while_the_receiver_waits() -> None:
    with VerbsWires(2, 1, nbytes=1000) as wires:
        wires.connect()
        receiver = wires.handlers[1]
        receiver.verdict = lambda h: WAIT
        for i in range(1000):
            wires.transports[0].send(1, 0, header(0, i, i + 1), memoryview(bytes([i % 251])))
        wires.until(lambda: receiver.admitted, "the first header")
        polled(wires.poller, 0.02)
        assert len(receiver.admitted) == 1
        assert len(wires.wire.writes) <= SETTINGS.slots
        receiver.verdict = None
        wires.transports[1].resume()
        wires.until(lambda: len(receiver.frames) == 1000, "all")
        assert receiver.memory == bytes(i % 251 for i in range(1000))


def test_many_frames_take_few_messages_and_wake_ups() -> None:
    size, n = 64 << 10, 512
    settings = VerbsSettings(window_nbytes=16 << 20, pool_nbytes=1 << 20)
    with VerbsWires(2, 1, nbytes=size, verbs=settings) as wires:
        wires.connect()
        wires.wire.writes.clear()
        source = wires.pooled(0, bytes(size))
        for _ in range(n):
            wires.transports[0].send(1, 0, header(0, 0, size), source)
        wires.until(lambda: len(wires.handlers[1].frames) == n, "all")
        payloads = [imm for nbytes, imm in wires.wire.writes if nbytes == size]
        assert len(payloads) == n
        # Batches of 64: two messages of offers, one of grants, one notice that the payloads are there.
        assert sum(imm is not None for _, imm in wires.wire.writes) <= n // MAX_OFFERS * 2 * 4 + 8


def test_wait_and_drop_of_large_frames() -> None:
    size = 20_000
    with VerbsWires(2, 1, nbytes=size) as wires:
        wires.connect()
        receiver = wires.handlers[1]
        receiver.verdict = lambda h: WAIT if h.step == 3 else DROP
        for step in range(1, 6):
            payload = wires.pooled(0, bytes([step]) * size)
            wires.transports[0].send(1, 0, header(0, 0, size, step=step), payload)
        wires.until(lambda: len(receiver.admitted) == 3, "the third header")
        polled(wires.poller, 0.01)
        receiver.verdict = lambda h: receiver.memory[:size] if h.step == 3 else DROP  # type: ignore[assignment,return-value]
        wires.transports[1].resume()
        wires.until(lambda: len(receiver.admitted) == 6 and receiver.frames, "all, the third asked twice")
        assert [frame.step for _, _, frame in receiver.frames] == [3]
        assert receiver.memory == bytes([3]) * size
        wires.until(lambda: wires.transports[0].queued_nbytes == 0, "nothing is left")


@pytest.mark.parametrize("who", ["sender", "receiver", "both"])
@pytest.mark.parametrize("flows", range(12))
def test_fence_in_mid_transfer(who: str, flows: int) -> None:
    """After a fence neither buffer is touched, and everything of the new epoch arrives, exactly once."""
    size, rng = 30_000, random.Random(flows)
    with VerbsWires(2, 1, nbytes=4 * size) as wires:
        wires.connect()
        wires.wire.held = True
        sender, receiver = wires.transports
        olds = [wires.pooled(0, b"o" * size) for _ in range(3)]
        for i, old in enumerate(olds):
            sender.send(1, 0, header(0, i * size, (i + 1) * size, step=i), old)
            sender.send(1, 0, header(Kind.TOKEN, 90 + i, step=i), None)
        for _ in range(flows):
            wires.poller.poll(0)
            wires.wire.flow(1)
        for transport in wires.transports if who == "both" else [sender if who == "sender" else receiver]:
            transport.fence()
        handler = wires.handlers[1]
        if who != "sender":  # a server that fenced may use its memory for something else
            handler.memory[:] = b"m" * (4 * size)
        if who != "receiver":
            for old in olds:
                old[:] = b"x" * size
        seen = len(handler.frames)
        before = bytes(handler.memory)
        if who == "receiver":
            handler.verdict = lambda h: DROP if h.epoch == 1 else handler.memory[h.start :][: h.nbytes]  # type: ignore[assignment,return-value]
        news = [rng.randbytes(size), rng.randbytes(size)]
        for i, new in enumerate(news):
            sender.send(1, 0, header(Kind.BROADCAST, i * size, (i + 1) * size, epoch=2), wires.pooled(0, new))
            sender.send(1, 0, header(Kind.TOKEN, i, epoch=2), None)
        wires.wire.held = False
        wires.wire.flow()
        wires.until(lambda: sum(f[2].epoch == 2 for f in handler.frames) == 4, "the new epoch")
        polled(wires.poller, 0.01)
        after = [frame for _, _, frame in handler.frames[seen:]]
        assert sum(frame.epoch == 2 for frame in after) == 4
        assert bytes(handler.memory[: 2 * size]) == news[0] + news[1]
        if who == "both":
            assert not [f for f in after if f.epoch == 1 and f.nbytes]
        if who != "sender":
            assert bytes(handler.memory[2 * size :]) == before[2 * size :]
        assert wires.handlers[0].losses == wires.handlers[1].losses == []
        assert sender.is_up(1, 0)
        wires.until(lambda: sender.queued_nbytes == 0, "nothing is left")
        assert len(wires.wire.pairs) == 2
    assert wires.wire.open == 0


def test_frames_that_a_fence_dropped_count_until_the_peer_has_answered() -> None:
    """Or a sender could offer more at once than the receiver keeps places for."""
    size, most = 1000, MAX_OFFERS
    with VerbsWires(2, 1, nbytes=size) as wires:
        wires.connect()
        source = wires.pooled(0, bytes(size))
        for epoch in range(1, 5):
            for _ in range(2 * most):
                wires.transports[0].send(1, 0, header(0, 0, size, epoch=epoch), source)
            wires.poller._run_soon()  # offered, and the receiver has not looked yet
            if epoch < 4:
                wires.transports[0].fence()
        wires.until(lambda: sum(f[2].epoch == 4 for f in wires.handlers[1].frames) == 2 * most, "the last")
        assert wires.handlers[0].losses == wires.handlers[1].losses == []
        wires.until(lambda: wires.transports[0].queued_nbytes == 0, "nothing is left")


@pytest.mark.slow
def test_random_fences_lose_no_frame_of_the_last_epoch() -> None:
    size = 3_000
    for seed in range(30):
        rng = random.Random(seed)
        with VerbsWires(2, 1, nbytes=20 * size) as wires:
            wires.connect()
            wires.wire.held = True
            epochs = [1, 1]
            for me, handler in enumerate(wires.handlers):

                def verdict(h: object, me: int = me, epochs: list[int] = epochs) -> object:
                    if h.epoch != epochs[me]:  # type: ignore[attr-defined]
                        return DROP if h.epoch < epochs[me] else WAIT  # type: ignore[attr-defined]
                    return wires.handlers[me].memory[h.start : h.start + h.nbytes]  # type: ignore[attr-defined]

                handler.verdict = verdict  # type: ignore[assignment]
            expected = []
            for epoch in range(1, 5):
                for me in rng.sample(range(2), 2):
                    if epoch > 1:
                        wires.transports[me].fence()
                        epochs[me] = epoch
                        wires.handlers[me].memory[:] = bytes(20 * size)
                        wires.transports[me].resume()
                    # Sizes on both sides of what fits into a slot.
                    expected = [
                        (i * size, i * size + rng.choice([1, 100, 449, 2000, size])) for i in range(20)
                    ]
                    for start, stop in expected:
                        payload = wires.pooled(me, bytes([epoch * 16 + me]) * (stop - start))
                        wires.transports[me].send(1 - me, 0, header(0, start, stop, epoch=epoch), payload)
                    for _ in range(rng.randrange(30)):
                        wires.wire.flow(rng.randrange(4))
                        wires.poller.poll(0)
            wires.wire.held = False
            wires.wire.flow()
            for handler in wires.handlers:
                wires.until(
                    lambda h=handler: sum(f[2].epoch == 4 for f in h.frames) == 20,  # type: ignore[misc]
                    f"the last epoch with seed {seed}",
                )
            for me, handler in enumerate(wires.handlers):
                last = [f for _, _, f in handler.frames if f.epoch == 4]
                assert len(last) == len(set(last)) == 20
                for frame in last:
                    got = bytes(handler.memory[frame.start : frame.stop])
                    assert got == bytes([64 + 1 - me]) * frame.nbytes
                assert handler.losses == []


def test_a_queue_pair_in_error_is_lost_once_and_made_again() -> None:
    with VerbsWires(2, 1, nbytes=1000) as wires:
        wires.connect()
        wires.transports[0].send(1, 0, header(0, 0, 1000), wires.pooled(0, bytes(1000)))
        wires.until(lambda: wires.handlers[1].frames, "a frame")
        wires.pair(0, 1).complete(Completion(1 << 32, 12, 0))
        wires.until(lambda: wires.handlers[0].losses, "the loss")
        assert wires.handlers[0].losses[0][:3] == (1, 0, "timeout")
        assert "no acknowledgement after all retries (status 12)" in wires.handlers[0].losses[0][3]
        wires.until(lambda: wires.handlers[1].losses, "the other side sees the end")
        assert not wires.wire.pairs
        wires.connect()
        wires.transports[1].send(0, 0, header(0, 0, 900), wires.pooled(1, bytes(900)))
        wires.until(lambda: wires.handlers[0].frames, "a frame over the new queue pair")
        assert [len(h.losses) for h in wires.handlers] == [1, 1]


def test_what_was_written_before_the_peer_closed_is_still_received() -> None:
    with VerbsWires(2, 1, nbytes=100) as wires:
        wires.connect()
        wires.transports[0].send(1, 0, header(0, 0, 100), memoryview(bytes(100)))
        wires.poller._run_soon()  # the frame is written, and the other side has not looked yet
        wires.transports[0].close()
        wires.until(lambda: wires.handlers[1].losses, "the end")
        assert wires.handlers[1].frames
        assert wires.handlers[1].losses[0][2] == "eof"


def test_frames_before_the_link_is_up_wait_and_an_absent_peer_is_lost() -> None:
    with VerbsWires(2, 1, nbytes=2000, connect_s=0.3) as wires:
        one, other = wires.transports
        other.set_peers({(0, 0): one.endpoints[0]})
        other.send(0, 0, header(0, 0, 2000), wires.pooled(1, b"a" * 2000))
        assert not other.is_up(0, 0)
        one.set_peers({(1, 0): other.endpoints[0]})
        wires.until(lambda: wires.handlers[0].frames, "the frame")
        assert wires.handlers[0].memory == b"a" * 2000
        one.set_peers({})
        wires.until(lambda: wires.handlers[1].losses, "closed")
        other.set_peers({(0, 0): one.endpoints[0]})
        wires.until(lambda: len(wires.handlers[1].losses) == 2, "never heard of")


def test_a_nic_that_makes_no_queue_pair_is_a_loss_with_its_reason() -> None:
    with VerbsWires(2, 1) as wires:
        wires.wire.broken_nic = "the port of fake is down"
        for server, transport in enumerate(wires.transports):
            transport.set_peers(wires.wanted(server))
        wires.until(lambda: all(h.losses for h in wires.handlers), "both lose it")
        assert any("the port of fake is down" in loss[3] for loss in wires.handlers[0].losses)


def test_silence_and_its_end() -> None:
    size = 5000
    with VerbsWires(2, 1, nbytes=size) as wires:
        wires.connect()
        one, _ = wires.transports
        one.silence(0)
        one.send(1, 0, header(0, 0, size), wires.pooled(0, bytes(size)))
        polled(wires.poller, 0.02)
        assert not wires.handlers[1].frames
        one.fence()
        one.unsilence(0)
        one.send(1, 0, header(0, 0, size), wires.pooled(0, b"b" * size))
        wires.until(lambda: wires.handlers[1].frames, "a frame after the silence")
        assert wires.handlers[1].memory == b"b" * size
        assert wires.handlers[0].losses == wires.handlers[1].losses == []


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("flows", range(0, 12, 2))
def test_frames_wait_for_the_end_of_a_short_silence(who: int, flows: int) -> None:
    """A NIC that is silent for less than `detect_s` is missed by no server, so nothing may be lost either."""
    size, n = 20_000, 8
    with VerbsWires(2, 1, nbytes=n * size) as wires:
        wires.connect()
        wires.wire.held = True
        data = random.Random(flows).randbytes(n * size)
        source = wires.pooled(0, data)
        for i in range(n):
            if i == n // 2:
                for _ in range(flows):
                    wires.poller.poll(0)
                    wires.wire.flow(1)
                wires.transports[who].silence(0)
            wires.transports[0].send(1, 0, header(0, i * size, (i + 1) * size), source[i * size :][:size])
            wires.transports[0].send(1, 0, header(Kind.TOKEN, i), None)
        wires.wire.held = False
        wires.wire.flow()
        polled(wires.poller, 0.02)
        assert len(wires.handlers[1].frames) < 2 * n
        wires.transports[who].unsilence(0)
        wires.until(lambda: len(wires.handlers[1].frames) == 2 * n, "all, after the silence")
        assert wires.handlers[1].memory == data
        wires.until(lambda: wires.transports[0].queued_nbytes == 0, "completions")
        stats, other = wires.transports[0].stats()[1, 0], wires.transports[1].stats()[0, 0]
        assert stats.frames_sent == other.frames_received == 2 * n
        assert wires.handlers[0].losses == wires.handlers[1].losses == []


def test_a_silence_while_the_queue_pair_is_made() -> None:
    size = 5000
    for steps in range(1, 12):
        with VerbsWires(2, 1, nbytes=size, connect_s=0.5) as wires:
            for server, transport in enumerate(wires.transports):
                transport.set_peers(wires.wanted(server))
            for _ in range(steps):
                wires.poller.poll(0.001)
            wires.transports[1].silence(0)
            polled(wires.poller, 0.01)
            wires.transports[1].unsilence(0)
            wires.transports[0].send(1, 0, header(0, 0, size), wires.pooled(0, b"d" * size))
            wires.until(lambda: wires.handlers[1].frames, f"a frame after silence at poll {steps}")
            assert wires.handlers[1].memory == b"d" * size
            assert wires.handlers[0].losses == wires.handlers[1].losses == []


def test_a_fence_in_silence_makes_the_queue_pair_again_afterwards() -> None:
    size = 5000
    with VerbsWires(2, 1, nbytes=size) as wires:
        wires.connect()
        wires.wire.held = True
        wires.transports[0].send(1, 0, header(0, 0, size), wires.pooled(0, bytes(size)))
        polled(wires.poller, 0.01)
        wires.wire.flow(1)  # the offer
        polled(wires.poller, 0.01)
        wires.transports[1].silence(0)
        wires.transports[1].fence()
        wires.wire.held = False
        wires.wire.flow()
        polled(wires.poller, 0.01)
        wires.transports[1].unsilence(0)
        wires.transports[0].send(1, 0, header(0, 0, size, step=2), wires.pooled(0, b"c" * size))
        wires.until(lambda: [f for f in wires.handlers[1].frames if f[2].step == 2], "a frame after it")
        assert wires.handlers[1].memory == b"c" * size


def test_handlers_may_fence_and_close_from_inside() -> None:
    size = 5000
    for large in (True, False):
        nbytes = size if large else 100
        with VerbsWires(2, 1, nbytes=size) as wires:
            wires.connect()
            one, other = wires.transports
            wires.handlers[1].on_received = lambda peer, level, h, other=other: other.fence()  # type: ignore[misc]
            for step in range(5):
                one.send(1, 0, header(0, 0, nbytes, step=step), wires.pooled(0, bytes(nbytes)))
            polled(wires.poller, 0.02)
            assert 1 <= len(wires.handlers[1].frames) <= 5
            wires.handlers[1].on_received = lambda peer, level, h, other=other: other.close()  # type: ignore[misc]
            one.send(1, 0, header(0, 0, nbytes, step=9), wires.pooled(0, bytes(nbytes)))
            wires.until(lambda: wires.handlers[0].losses, "the sender sees the end")
            assert [f[2].step for f in wires.handlers[1].frames][-1] == 9


def test_settings_reach_the_queue_pair_and_differing_slots_are_named() -> None:
    settings = VerbsSettings(timeout=18, retries=2)
    with VerbsWires(2, 1, verbs=settings, traffic_class=104) as wires:
        wires.connect()
        assert set(wires.wire.reliability) == {(18, 2, 104)}
    with VerbsWires(1, 1) as wires:
        other = Recorder()
        wires.transports.append(wires.make(1, other, verbs=VerbsSettings(slots=32)))
        wires.handlers.append(other)
        for server, transport in enumerate(wires.transports):
            transport.set_peers(wires.wanted(server))
        wires.until(lambda: wires.handlers[0].losses or other.losses, "the loss")
        losses = [*wires.handlers[0].losses, *other.losses]
        assert losses[0][2] == "malformed"
        assert "BML_RDMA_SLOTS" in losses[0][3]


def test_twenty_thousand_small_transfers_leave_nothing() -> None:
    with VerbsWires(2, 1, nbytes=600) as wires:
        wires.connect()
        source = wires.pooled(0, bytes(600))
        pool = wires.transports[0].pool  # type: ignore[attr-defined]
        free = pool.free_nbytes
        got = wires.handlers[1]
        for _ in range(20):
            for i in range(100):
                size = 600 if i % 2 else 4
                wires.transports[0].send(1, 0, header(0, 0, size), source[:size])
            wires.until(lambda: len(got.frames) == 100, "a hundred")
            got.frames.clear()
        wires.until(lambda: wires.transports[0].queued_nbytes == 0, "completions")
        assert pool.free_nbytes == free
        connection = wires.transports[0]._links[1, 0].connection
        assert connection.pending == (0, 0)  # type: ignore[union-attr]


@pytest.mark.parametrize("width", [16, 24, 32])
def test_counters_go_past_their_width_on_the_wire(width: int) -> None:
    """Offers have 32 bits, and 16 where they are said to be complete; messages 24; requests 32 of 64."""
    n, size = 40, 5000
    data = random.Random(7).randbytes(n * size)
    with VerbsWires(2, 1, nbytes=len(data)) as wires:
        wires.connect()
        connections = [wires.transports[who]._links[1 - who, 0].connection for who in (0, 1)]
        for connection in connections:
            outgoing, incoming = connection._outgoing, connection._incoming  # type: ignore[union-attr]
            if width == 24:  # by whole rounds of the ring, to its place just before the end
                more = (1 << 24) - SETTINGS.slots
                for counter in ("_filled", "_written", "_handled", "_credited"):
                    setattr(outgoing, counter, getattr(outgoing, counter) + more)
                incoming.handled += more
                incoming._arrived += more
            else:
                outgoing._offers = (1 << width) - n // 2
                outgoing._requests = outgoing._completed = outgoing._signaled = (1 << width) - n
        for who in (0, 1):
            source, target = wires.pooled(who, data), wires.handlers[1 - who]
            for round_ in range(1, 5):
                for start in range(0, len(data), size):
                    stop = start + size
                    wires.transports[who].send(1 - who, 0, header(who, start, stop), source[start:stop])
                wires.until(lambda: len(target.frames) == n * round_, "all")  # noqa: B023
                assert target.memory == data
                target.memory[:] = bytes(len(data))
        if width == 24:
            assert all(each._incoming.handled > 1 << 24 for each in connections)  # type: ignore[union-attr]
