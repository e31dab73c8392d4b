"""The order of steps with priorities: the same on all servers, whatever each has begun by when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from bml.cluster.spec.job import JobSpec
from bml.protocol.step.slices import slice_nbytes
from bml.topology.errors import UsageError
from bml.train.priority.order import SLOTS, Order
from bml.train.priority.pieces import checked_priority, cuts


class Step(NamedTuple):
    number: int
    priority: int | None
    n_pieces: int


class Server:
    """A server that has begun the first of these steps, and takes part in each as all do."""

    def __init__(self, steps: Sequence[Step]):
        self.order: Order[Step] = Order()
        self._ahead = list(reversed(steps))
        self._left = {step.number: step.n_pieces for step in steps}

    def begin(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._ahead))):
            self.order.begin(self._ahead.pop())

    def committed(self, number: int, missing: list[bool]) -> None:
        self.order.committed(number, missing)
        self._left[number] -= 1
        if not self._left[number]:
            self.order.end(number)


def drawn(chance: random.Random, n: int) -> list[Step]:
    priorities = [None, *range(4)] if chance.random() < 0.5 else list(range(8))
    return [Step(number, chance.choice(priorities), chance.randint(1, 4)) for number in range(n)]


def run(seed: int, n_steps: int = 30) -> list[int]:
    """Do all steps on all servers; returns their numbers, piece by piece."""
    chance = random.Random(seed)
    steps = drawn(chance, n_steps)
    servers = [Server(steps) for _ in range(chance.randint(2, 5))]
    follower = servers[-1] if chance.random() < 0.3 else None  # its word does not count
    done: list[int] = []
    n_pieces = sum(step.n_pieces for step in steps)
    while len(done) < n_pieces:
        for server in servers:
            server.begin(chance.choice([0, 0, 1, 1, 5, 50]))
        chosen = [server.order.next() for server in servers]
        if None in chosen:
            for server in servers:
                server.begin()
            continue
        numbers = {choice[0] for choice in chosen if choice}
        assert len(numbers) == 1, f"seed {seed}: they choose {numbers}"
        number = numbers.pop()
        words = [server.order.missing() for server in servers if server is not follower]
        missing = [any(each) for each in zip(*words, strict=True)]
        for server in servers:
            server.committed(number, missing)
        done.append(number)
    return done


def test_all_servers_choose_the_same_whatever_each_has_begun() -> None:
    for seed in range(150):
        assert sorted(set(run(seed))) == list(range(30))


def test_a_server_that_chooses_by_what_itself_has_begun_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Order, "_agreed", property(lambda self: self._n_begun, lambda self, value: None), raising=False
    )
    with pytest.raises(AssertionError, match="they choose"):
        all(map(run, range(1000)))


def test_the_most_urgent_of_those_begun_by_all_is_next() -> None:
    steps = [Step(0, 9, 3), Step(1, 2, 1), Step(2, 2, 1), Step(3, 1, 1)]
    fast, slow = Server(steps), Server(steps)
    fast.begin(4)
    slow.begin(3)
    sent = []
    for _ in range(6):
        (number, _), other = fast.order.next() or (-1, None), slow.order.next()
        assert other is not None
        assert number == other[0]
        missing = [a or b for a, b in zip(fast.order.missing(), slow.order.missing(), strict=True)]
        for server in (fast, slow):
            server.committed(number, missing)
        sent.append(number)
        if number == 2:
            slow.begin()
    # 3 is begun by both before the first piece of 0 that follows, in which they say so.
    assert sent == [0, 1, 2, 0, 3, 0]


def test_a_step_without_priority_is_neither_overtaken_nor_overtakes() -> None:
    server = Server([Step(0, 5, 2), Step(1, None, 1), Step(2, 0, 1), Step(3, None, 1)])
    server.begin(4)
    sent = []
    while (choice := server.order.next()) is not None:
        server.committed(choice[0], server.order.missing())
        sent.append(choice[0])
    assert sent == [0, 0, 1, 2, 3]


def test_more_steps_than_a_step_tells_of_are_agreed_in_turns() -> None:
    n = 3 * SLOTS
    server = Server([Step(number, n - number, 2) for number in range(n)])
    server.begin(n)
    sent = []
    while (choice := server.order.next()) is not None:
        server.committed(choice[0], server.order.missing())
        sent.append(choice[0])
    assert sorted(sent) == sorted([*range(n)] * 2)
    assert sent[:4] == [0, SLOTS - 1, 2 * SLOTS - 1, 3 * SLOTS - 1], "each tells of so many more"


@pytest.mark.parametrize(
    ("size", "itemsize", "nbytes", "n"),
    [(0, 4, 100, 1), (10, 4, 40, 1), (14, 4, 40, 1), (100, 4, 40, 10), (3, 8, 8, 3), (1, 8, 1, 8)],
)
def test_pieces_are_equal_and_cover_the_vector(size: int, itemsize: int, nbytes: int, n: int) -> None:
    found = cuts(size, itemsize, nbytes)
    lengths = np.diff(found)
    assert (len(lengths), found[0], found[-1]) == (n, 0, size)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("fabric", ["bcube:2x2", "bcube:3x2", "switch:4"])
@pytest.mark.parametrize("rate", [12e6, 24e6, 120e6, 1.2e9])
def test_a_piece_has_many_slices_for_each_nic(fabric: str, rate: float) -> None:
    """The wires rest at the ends of a piece, for the time of a few slices."""
    spec = JobSpec(fabric, nic_rate=rate)
    nbytes = spec.piece_nbytes()
    assert nbytes / spec.parsed_fabric().levels / slice_nbytes(nbytes, rate) >= 14


@pytest.mark.parametrize("wrong", [True, 1.5, "2"])
def test_a_priority_is_a_whole_number(wrong: object) -> None:
    with pytest.raises(UsageError, match="whole number"):
        checked_priority(wrong)  # type: ignore[arg-type]
    assert checked_priority(np.int32(3)) == 3  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="then is for steps with a priority"):
        checked_priority(None, print)
