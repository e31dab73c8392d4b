"""All collectives on real processes, of which one is killed in the middle: the root of some of them."""

from __future__ import annotations

from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.errors import ContributorLost
from bml.sharedmem import segment

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

N, STEPS, VICTIM = 4, 12, 1
BITS = np.array([0x7FF4000000000001, 0xFFF8000000000ABC, 0x8000000000000000], np.uint64)
"""A signalling NaN, a NaN with a payload, minus zero."""


def every_collective(session: bml.Session, n_odd: int) -> list[Any]:
    """Each collective once a step, with arrays of a length that whole words do not divide.

    Returns for each step the contributors and the result of each collective.
    """
    me, found = session.server, []
    for step in session.steps(STEPS):
        mine = np.full(n_odd, 10 * step + me, np.int8)
        each = [np.full(3, 100 * me + to + step) for to in range(N)]
        steps: list[tuple[Any, Any]] = []

        def note(result: Any, steps: list[tuple[Any, Any]] = steps) -> None:
            steps.append((session.contributors, result))

        note(session.broadcast((BITS + np.uint64(me)).view(np.float64), VICTIM).view(np.uint64))
        note(session.all_gather(mine))
        note(session.gather(np.array([me]), 0))
        note(session.all_to_all(each))
        note(session.reduce(np.array([me + 1]), VICTIM, "prod"))
        note(session.reduce_scatter_async(each).wait())
        try:
            note(session.scatter(each if me == VICTIM else None, VICTIM))
        except ContributorLost as error:
            note(str(error))
        note(session.allreduce(np.array([me]), "avg"))
        found.append(steps)
    return found


def check(me: int, step: int, n_odd: int, steps: list[tuple[Any, Any]]) -> None:
    """Compare the results of one step on one server with the contributors that it names."""
    who = [set(contributors) for contributors, _ in steps]
    sent, gathered, at_root, exchanged, product, share, scattered, mean = [result for _, result in steps]
    source = VICTIM if VICTIM in who[0] else min(who[0])
    assert sent.tolist() == (BITS + np.uint64(source)).tolist()
    for server in range(N):
        if server in who[1]:
            assert np.array_equal(gathered[server], np.full(n_odd, 10 * step + server))
        else:
            assert gathered[server] is None
        if server in who[3]:
            assert exchanged[server].tolist() == [100 * server + me + step] * 3
        else:
            assert exchanged[server] is None
    if me == 0:
        assert [each is not None and int(each[0]) for each in at_root] == [
            server in who[2] and server for server in range(N)
        ]
    else:
        assert at_root is None
    assert product is None or (me == VICTIM and product.tolist() == [np.prod([each + 1 for each in who[4]])])
    assert share.tolist() == [sum(100 * each + me + step for each in who[5])] * 3
    if VICTIM in who[6]:
        assert scattered.tolist() == [100 * VICTIM + me + step] * 3
    else:
        assert "server 1, the root of a scatter" in scattered
    assert mean.tolist() == [sum(who[7]) / len(who[7])]


SHM = pytest.mark.skipif(bool(segment.why_not()), reason="no shared memory")
LONG = [
    pytest.param("tcp", 300_007),
    pytest.param("shm", 20_011, marks=SHM),
    pytest.param("shm", 300_007, marks=SHM),
]
"""Of long vectors the zeros are left out: in shared memory of those that all add, and of those in shares."""


@pytest.mark.parametrize(
    ("transport", "n_odd"),
    [("tcp", 13), pytest.param("shm", 13, marks=SHM), *LONG],
)
def test_all_go_on_when_a_root_is_killed(transport: str, n_odd: int) -> None:
    result = jobs.launch(
        lambda session: every_collective(session, n_odd),
        "bcube:2x2",
        transport=transport,
        faults=[f"kill:{VICTIM}@step=40"],
    )
    assert sorted(result.values) == [0, 2, 3]
    contributors = [[who for who, _ in steps] for steps in result.values[0]]
    assert contributors[0][0] == (0, 1, 2, 3)
    assert contributors[-1][-1] == (0, 2, 3)
    for me, found in result.values.items():
        assert [[who for who, _ in steps] for steps in found] == contributors
        for step, steps in enumerate(found):
            check(me, step, n_odd, steps)


@pytest.mark.parametrize(("transport", "n"), [("tcp", 1), pytest.param("shm", 40_000, marks=SHM)])
def test_a_server_that_comes_back_is_given_the_same_results(transport: str, n: int) -> None:
    """It has other results only where a root gets one, and where it was itself lost."""

    def pair(repeated: Any) -> list[int]:
        assert np.array_equal(repeated, repeated[::n].repeat(n))
        return list(map(int, repeated[::n]))

    def train(session: bml.Session) -> Any:
        count = np.zeros(1)
        session.state(count=count)
        found = {}
        for step in session.steps(100_000):
            count += 1
            mine = np.array([session.server, step]).repeat(n)
            everybody = session.all_gather(mine)
            sent = session.broadcast(mine, VICTIM)
            try:
                part = pair(session.scatter([mine] * N if session.server == VICTIM else None, VICTIM))
            except ContributorLost:
                part = None
            rows = [None if each is None else pair(each) for each in everybody]
            found[step] = (session.contributors, rows, pair(sent), part)
            if step > 20 and VICTIM in session.contributors:  # alike on all servers
                break
        return found

    result = jobs.launch(
        train, "bcube:2x2", transport=transport, faults=[f"kill:{VICTIM}@step=12"], rejoin=True
    )
    first, back = result.values[0], result.values[VICTIM]
    assert {who for who, *_ in first.values()} == {(0, 2, 3), (0, 1, 2, 3)}
    assert back
    assert all(first[step] == steps for step, steps in back.items())
