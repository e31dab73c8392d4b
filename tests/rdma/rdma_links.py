"""Pairs of transports over RDMA: cuts, errors, fences, and a long run."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from conftest import cable

from bml.io.memory import RegisteredPool
from bml.protocol.wire.frame import Header, Kind
from bml.transport import Poller
from bml.transport.handshake.auth import Identity
from bml.transport.verbs import VerbsSettings, VerbsTransport

TOKEN, JOB = b"a token of the tests", "rdma-links"


class End:
    """Server 0 or 1 with both its NICs, receiving into `memory` at the header's range."""

    def __init__(self, server: int, poller: Poller, settings: VerbsSettings, nbytes: int) -> None:
        self.server = server
        self.received_from: list[Header] = []
        self.losses: list[tuple[int, str, str]] = []
        self.pool = RegisteredPool(settings.pool_nbytes)
        nics = [f"10.7.{rail}.{server + 1}" for rail in range(2)]
        self.transport = VerbsTransport(
            Identity.of(TOKEN, JOB, server), nics, poller, self, verbs=settings, pool=self.pool
        )
        self.memory = self.pool.empty(nbytes, "uint8").data
        self.source = self.pool.empty(nbytes, "uint8").data

    def admit(self, peer: int, level: int, header: Header) -> memoryview:
        return self.memory[header.start : header.start + header.nbytes]

    def received(self, peer: int, level: int, header: Header) -> None:
        self.received_from.append(header)

    def heard(self, peer: int, level: int) -> None: ...

    def stood_in(self, peer: int, level: int) -> None: ...

    def proved(self, peer: int, level: int) -> None: ...

    def lost(self, peer: int, level: int, kind: str, why: str) -> None:
        self.losses.append((level, kind, why))

    def want(self, other: End) -> None:
        self.transport.set_peers(
            {(other.server, level): endpoint for level, endpoint in enumerate(other.transport.endpoints)}
        )

    @property
    def is_up(self) -> bool:
        return all(self.transport.is_up(1 - self.server, level) for level in range(2))


class Pair:
    def __init__(self, nbytes: int, **settings: Any) -> None:
        self.poller = Poller()
        chosen = VerbsSettings(**{"timeout": 14, "retries": 3, "pool_nbytes": 8 << 20, **settings})
        self.ends = [End(server, self.poller, chosen, nbytes) for server in range(2)]

    def connect(self) -> None:
        one, other = self.ends
        one.want(other)
        other.want(one)

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
        end_s = time.monotonic() + deadline_s
        while not condition():
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"waited {deadline_s} s for {what}; losses {[end.losses for end in self.ends]}"
            self.poller.poll(min(left_s, 0.05))

    def until_up(self) -> None:
        """Connect, and again whatever is lost meanwhile."""

        def up() -> bool:
            self.connect()
            return all(end.is_up for end in self.ends)

        self.until(up, "both links")

    def send(self, sender: int, level: int, start: int, stop: int, step: int = 1) -> None:
        header = Header(Kind.REDUCE, 1, step, sender, 1 - sender, 0, start, stop, stop - start)
        end = self.ends[sender]
        end.transport.send(1 - sender, level, header, end.source[start:stop])

    def __enter__(self) -> Pair:
        self.until_up()
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.transport.close()
        self.poller.close()


def test_random_cuts_of_random_cables() -> None:
    rng, nbytes, most = random.Random(7), 120_000, 100
    cuts = lost = 0
    with Pair(2 * nbytes, timeout=13) as pair:
        while cuts < most:
            cuts += 1
            data = [rng.randbytes(2 * nbytes) for _ in range(2)]
            for end, text in zip(pair.ends, data, strict=True):
                end.source[:] = text
                end.memory[:] = bytes(2 * nbytes)
            exchange(pair, nbytes, 2 * cuts)
            for _ in range(rng.randrange(6)):
                pair.poller.poll(0)
            server, rail = rng.randrange(2), rng.randrange(2)
            cable(server, rail, "down")
            pair.until(lambda: hurt(pair) or arrived(pair, 2 * cuts), "the cut, or the end")  # noqa: B023
            lost += hurt(pair)
            cable(server, rail, "up")
            # As a server does: the step is tried again over links that are made again, until it is through.
            while not arrived(pair, 2 * cuts + 1):
                pair.until_up()
                for end in pair.ends:
                    end.transport.fence()
                    end.received_from.clear()
                    end.losses.clear()
                exchange(pair, nbytes, 2 * cuts + 1)
                pair.until(lambda: arrived(pair, 2 * cuts + 1) or hurt(pair), "the step")  # noqa: B023
            for me, end in enumerate(pair.ends):
                assert bytes(end.memory) == data[1 - me]
                end.losses.clear()
            pair.until_up()
    print(f"\n{cuts} cuts, {lost} of them in mid-transfer")
    assert lost >= most // 5


def exchange(pair: Pair, nbytes: int, step: int) -> None:
    """Both ends send something over both NICs."""
    for sender in range(2):
        for level in range(2):
            pair.send(sender, level, level * nbytes, (level + 1) * nbytes, step=step)


def arrived(pair: Pair, step: int) -> bool:
    return all(sum(header.step == step for header in end.received_from) == 2 for end in pair.ends)


def hurt(pair: Pair) -> bool:
    return any(end.losses for end in pair.ends)


@pytest.mark.smoke
def test_a_queue_pair_driven_into_the_error_state() -> None:
    import pyverbs.qp as qp
    from pyverbs import enums

    with Pair(100_000) as pair:
        connection: Any = pair.ends[0].transport._links[1, 0].connection
        attr = qp.QPAttr(qp_state=enums.IBV_QPS_ERR, cur_qp_state=enums.IBV_QPS_RTS)
        connection._pair._qp.modify(attr, enums.IBV_QP_STATE)
        pair.until(lambda: pair.ends[0].losses and pair.ends[1].losses, "the loss")
        print("\n", pair.ends[0].losses, pair.ends[1].losses)
        assert pair.ends[0].losses[0][:2] == (0, "reset")
        pair.until_up()
        pair.ends[0].source[:] = bytes(range(250)) * 400
        pair.send(0, 0, 0, 100_000)
        pair.until(lambda: pair.ends[1].received_from, "a payload over the new queue pair")
        assert bytes(pair.ends[1].memory) == bytes(range(250)) * 400


@pytest.mark.smoke
def test_fences_in_mid_transfer_keep_memory_untouched() -> None:
    nbytes, rounds = 200_000, 20
    with Pair(nbytes) as pair:
        one, other = pair.ends
        for number in range(rounds):
            one.source[:] = bytes([number]) * nbytes
            for start in range(0, nbytes, 50_000):
                pair.send(0, 0, start, start + 50_000, step=number)
            for _ in range(number % 7):
                pair.poller.poll(0.002)
            other.transport.fence()
            other.memory[:] = b"m" * nbytes
            one.transport.fence()
            pair.until(lambda: one.is_up and other.is_up, "the links after the fence")
            assert bytes(other.memory) == b"m" * nbytes
        assert not one.losses
        assert not other.losses
        pair.send(0, 0, 0, nbytes, step=99)
        pair.until(lambda: other.received_from and other.received_from[-1].step == 99, "the last payload")
        assert bytes(other.memory) == bytes([rounds - 1]) * nbytes


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_twenty_thousand_transfers_leave_memory_flat() -> None:
    with Pair(8192) as pair:
        done = 0
        sizes = [resident_nbytes()]
        while done < 20_000:
            for index in range(100):
                pair.send(0, index % 2, 0, 8192 if index % 10 == 0 else 64)
            pair.until(lambda: len(pair.ends[1].received_from) == 100, "a hundred")
            pair.ends[1].received_from.clear()
            done += 100
            if done % 5000 == 0:
                sizes.append(resident_nbytes())
    # What is not freed grows in every part; Python's own memory may take a step once.
    grown = min(after - before for before, after in pairwise(sizes[1:]))
    print(f"\nresident: {[size >> 10 for size in sizes]} KiB")
    assert grown < 100 << 10
