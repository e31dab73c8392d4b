"""Messages between ranks: order, matching, lengths and lost ranks; on a network that a seed delays."""

import random
from collections import deque

import numpy as np
import pytest

from bml.cluster.formation.point_to_point import ANY, PointToPoint
from bml.errors import BmlError, ContributorLost, UsageError

MIB = 1 << 20


class Net:
    """Ranks with a queue of bytes for each ordered pair."""

    def __init__(self, size: int):
        self.wires: dict[tuple[int, int], deque[bytes]] = {}
        self.most_queued = 0
        self.ranks = [PointToPoint(self._poster(rank)) for rank in range(size)]

    def _poster(self, rank: int):
        def post(to: int, message: bytes) -> None:
            wire = self.wires.setdefault((rank, to), deque())
            wire.append(message)
            self.most_queued = max(self.most_queued, sum(map(len, wire)))

        return post

    def step(self, rng: random.Random) -> bool:
        """Bring one message to its rank; returns whether there was one."""
        ready = [pair for pair, wire in self.wires.items() if wire]
        if ready:
            source, to = rng.choice(ready)
            message = self.wires[source, to].popleft()
            self.ranks[to].came(source, message, self._answer(to, source))
        return bool(ready)

    def _answer(self, rank: int, to: int):
        return lambda message: self.wires.setdefault((rank, to), deque()).append(message)

    def run(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        while self.step(rng):
            pass


def receive(of: PointToPoint, source: int, tag: int, nbytes: int) -> tuple[bytearray, list[int | BmlError]]:
    into, done = bytearray(nbytes), []
    of.receive(source, tag, memoryview(into), done.append)
    return into, done


def send(of: PointToPoint, to: int, tag: int, data: bytes) -> list[int | BmlError]:
    done: list[int | BmlError] = []
    of.send(to, tag, memoryview(data), done.append)
    return done


@pytest.mark.parametrize("seed", range(40))
def test_every_message_comes_in_order_to_who_waits_for_it(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 5)
    net = Net(size)
    sent: dict[tuple[int, int, int], deque[bytes]] = {}
    received, confirmed = [], []
    for _ in range(60):
        source, to = rng.sample(range(size), 2)
        tag, nbytes = rng.randrange(3), 8
        if rng.random() < 0.5:
            data = rng.randbytes(nbytes)
            sent.setdefault((source, to, tag), deque()).append(data)
            confirmed.append(send(net.ranks[source], to, tag, data))
        else:
            wanted = rng.choice([source, ANY])
            received.append((to, wanted, tag, receive(net.ranks[to], wanted, tag, nbytes)))
        for _ in range(rng.randrange(4)):
            net.step(rng)
    net.run(seed)
    assert all(done for done in confirmed)
    # Each receiver that is done has the oldest message of its source that none before it has.
    by_order = [each for each in received if each[3][1]]
    taken: dict[tuple[int, int, int], list[bytes]] = {}
    for to, wanted, tag, (into, (source,)) in by_order:
        assert wanted in (source, ANY)
        taken.setdefault((source, to, tag), []).append(bytes(into))
    for key, datas in taken.items():
        assert sorted(datas) == sorted(list(sent[key])[: len(datas)])
    # Nobody waits for a message that is here.
    for to, wanted, tag, (_, done) in received:
        if not done:
            left = [
                key
                for key, datas in sent.items()
                if key[1:] == (to, tag) and wanted in (key[0], ANY) and len(datas) > len(taken.get(key, ()))
            ]
            assert not left


def test_messages_of_one_rank_and_tag_keep_their_order() -> None:
    net = Net(2)
    for number in range(10):
        send(net.ranks[0], 1, 7, bytes([number]))
    net.run()
    assert [bytes(receive(net.ranks[1], 0, 7, 1)[0]) for _ in range(10)] == [bytes([n]) for n in range(10)]


@pytest.mark.parametrize("nbytes", [0, 1, MIB - 1, MIB, MIB + 1, 11 * MIB + 5])
def test_long_messages_travel_in_parts_and_few_bytes_wait(nbytes: int) -> None:
    net, data = Net(2), np.random.default_rng(nbytes).bytes(nbytes)
    done = send(net.ranks[0], 1, 0, data)
    assert not done
    net.run()
    assert done == [1]
    into, received = receive(net.ranks[1], ANY, 0, nbytes)
    assert (bytes(into) == data, received) == (True, [0])
    assert net.most_queued < 4 * MIB + 1000


def test_another_length_is_an_error_and_the_message_stays() -> None:
    net = Net(2)
    send(net.ranks[0], 1, 0, b"12345678")
    net.run()
    _, done = receive(net.ranks[1], 0, 0, 4)
    assert isinstance(done[0], UsageError)
    assert "8 bytes" in str(done[0])
    into, done = receive(net.ranks[1], 0, 0, 8)
    assert (bytes(into), done) == (b"12345678", [0])


def test_a_lost_rank_ends_what_waits_for_it() -> None:
    net = Net(3)
    sending = send(net.ranks[0], 1, 0, bytes(20 * MIB))
    behind = send(net.ranks[0], 1, 0, b"x")
    of_it, of_any = receive(net.ranks[0], 1, 0, 8)[1], receive(net.ranks[0], ANY, 0, 8)[1]
    other = receive(net.ranks[0], 2, 0, 8)[1]
    net.ranks[0].lost(1, "it is dead")
    for done in (sending, behind, of_it):
        assert isinstance(done[0], ContributorLost)
        assert "rank 1" in str(done[0])
    assert not of_any
    assert not other
    net.wires.clear()
    assert send(net.ranks[0], 2, 0, b"y") == []
    net.run()
    assert net.ranks[0].partners == {2, ANY}


def test_a_broken_connection_ends_only_what_was_on_its_way() -> None:
    net, rng = Net(2), random.Random(1)
    long = send(net.ranks[0], 1, 0, bytes(10 * MIB))
    waits = receive(net.ranks[1], 0, 1, 1)[1]
    for _ in range(5):
        net.step(rng)
    half = receive(net.ranks[1], 0, 0, 10 * MIB)[1]
    net.wires.clear()
    net.ranks[0].unsent(1, "reset")
    net.ranks[1].cut(0, "reset")
    assert isinstance(long[0], ContributorLost)
    assert isinstance(half[0], ContributorLost)
    assert isinstance(waits[0], ContributorLost)
    again = send(net.ranks[0], 1, 5, b"z")
    net.run()
    assert again == [1]
    assert receive(net.ranks[1], 0, 5, 1)[1] == [0]


def test_what_arrived_of_a_lost_rank_can_be_received() -> None:
    net = Net(2)
    send(net.ranks[0], 1, 0, b"last")
    net.run()
    net.ranks[1].lost(0, "it is dead")
    assert receive(net.ranks[1], 0, 0, 4)[1] == [0]


def test_at_the_end_nothing_waits() -> None:
    net = Net(2)
    waiting = [send(net.ranks[0], 1, 0, bytes(9 * MIB)), receive(net.ranks[0], 1, 0, 1)[1]]
    net.ranks[0].fail(BmlError("over"))
    assert [str(done[0]) for done in waiting] == ["over", "over"]
    assert not net.ranks[0].partners


def ignore(*_: object) -> None:
    pass


@pytest.mark.slow
def test_thousands_of_messages_are_not_looked_through_for_one() -> None:
    """They were, in the thread that shows that this rank lives: 4,000 took 4 s, 80,000 half an hour."""
    n, filled = 80_000, list[int]()
    sender = PointToPoint(
        lambda to, message: ends.came(1, message, lambda answer: sender.came(0, answer, ignore))
    )
    ends = PointToPoint(ignore)
    for number in range(n):
        sender.send(0, number % 2, memoryview(number.to_bytes(4, "big")), ignore)
    for _ in range(1, n, 2):
        into = bytearray(4)
        ends.receive(1, 1, memoryview(into), lambda source: None)
        filled.append(int.from_bytes(into, "big"))
    assert filled == list(range(1, n, 2))
