"""Collectives that move values: bits, places, and what a lost root or contributor means in each."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import numpy as np
import pytest
from model_jobs import job, results

from bml.errors import ContributorLost, StepMismatch, UsageError
from bml.sim.programs.faults import Faults
from bml.train.bfloat16 import BFLOAT16

pytestmark = pytest.mark.timeout(60)

N = 4
MOMENTS = ("before", "brought", "committed")
NAN = np.array([0x7FF4000000000001, 0xFFF8000000000ABC, 0x8000000000000000, 1], np.uint64)
"""A signalling NaN, a NaN with a payload, minus zero, the smallest number: no float operation keeps all."""


def of(server: int, kind: str) -> Any:
    """The array of a server; all of one kind have one shape and dtype."""
    if kind == "nan":
        return np.roll(NAN, server).view(np.float64)
    if kind == "text":
        return np.array(["a\0", "é", f"{server}"], "U3")
    if kind == "time":
        return np.array([server, "NaT"], "datetime64[s]")
    if kind == "bool":
        return np.array([server % 2 == 0, True, False])
    if kind == "bfloat16":
        return np.array([0x8000, 0x7F81, server], np.uint16).view(BFLOAT16)
    if kind == "strided":
        return (np.arange(24.0).reshape(4, 6) + server)[::2, 1::3].T
    if kind == "none":
        return np.zeros((3, 0), np.int16)
    if kind == "number":
        return np.float16(-server)
    if kind == "unaligned":
        found = np.empty(33, np.uint8)[1:].view(np.float64)
        found[:] = server
        assert not found.flags.aligned
        return found
    if kind == "swapped":
        return np.arange(5, dtype=">i4") * server
    return (np.arange(35) * 37 + server).astype(kind).reshape(5, 7)


KINDS = ("nan", "text", "time", "bool", "bfloat16", "strided", "none", "number", "swapped", "int8", "uint64")
KINDS += ("float32", "complex128", "int16", "unaligned")


def same(found: Any, expected: Any) -> bool:
    """Whether two arrays have the same dtype, shape and bits."""
    found, expected = np.asarray(found), np.asarray(expected)
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_of_every_dtype_comes_through(kind: str) -> None:
    def train(session: Any) -> Any:
        me = session.server
        return (
            session.broadcast(of(me, kind), 2),
            session.broadcast([of(me, kind), of(me + 1, "int8"), of(me + 2, kind)]),
            session.all_gather(of(me, kind)),
            session.gather(of(me, kind), 3),
            session.all_to_all([of(10 * me + to, kind) for to in range(N)]),
            session.scatter([of(10 + to, kind) for to in range(N)] if me == 1 else None, 1),
        )

    for me, (sent, sent_list, gathered, at_root, exchanged, scattered) in results(train).items():
        assert same(sent, of(2, kind))
        assert len(sent_list) == 3
        for number, (found, its) in enumerate(zip(sent_list, (kind, "int8", kind), strict=True)):
            assert same(found, of(number, its))
            assert found.flags.aligned
        assert all(same(found, of(server, kind)) for server, found in enumerate(gathered))
        assert len(gathered) == len(exchanged) == N
        if me == 3:
            assert all(same(found, of(server, kind)) for server, found in enumerate(at_root))
        else:
            assert at_root is None
        assert all(same(found, of(10 * server + me, kind)) for server, found in enumerate(exchanged))
        assert same(scattered, of(10 + me, kind))


def dies(server: int, when: str, call: int = 2) -> Faults:
    """The fault: this server dies in this call."""
    return Faults(kills={server: (call, when)})


def rows(found: Any) -> Any:
    """The first elements of a list of arrays, None for None."""
    return found and [None if each is None else int(each[0]) for each in found]


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_a_lost_server_means_what_the_reference_says(victim: int, when: str, waits: bool) -> None:
    """The victim dies in the second step; server 1 is the root. Before and after it all goes well."""

    def call(session: Any, name: str, *given: Any) -> Any:
        begun = getattr(session, name + "_async" if waits else name)(*given)
        return begun.wait() if waits else begun

    def train_with(name: str) -> Any:
        def train(session: Any) -> Any:
            me, found = session.server, []
            for step in range(3):
                mine = np.array([100 * step + me, 7])
                each = [mine + 10 * to for to in range(N)]
                given = {
                    "broadcast": (mine, 1),
                    "all_gather": (mine,),
                    "gather": (mine, 1),
                    "all_to_all": (each,),
                    "reduce": (mine, 1),
                    "reduce_scatter": (each,),
                }[name]
                found.append((call(session, name, *given), session.contributors))
            return found

        return train

    for name in ("broadcast", "all_gather", "gather", "all_to_all", "reduce", "reduce_scatter"):
        ends = results(train_with(name), N, dies(victim, when))
        assert sorted(ends) == [server for server in range(N) if server != victim]
        for me, steps in ends.items():
            for step, (found, contributors) in enumerate(steps):
                assert contributors in may_contribute(step, victim, when)
                assert contributors == ends[2][step][1]
                check(name, step, me, found, contributors)


def may_contribute(step: int, victim: int, when: str) -> set[tuple[int, ...]]:
    """Who may be in a step, if the victim dies in the second one: it may bring its part last, or not last."""
    everybody, others = tuple(range(N)), tuple(each for each in range(N) if each != victim)
    of_second = {"before": {others}, "brought": {others, everybody}, "committed": {everybody}}
    return ({everybody}, of_second[when], {others})[step]


def check(name: str, step: int, me: int, found: Any, contributors: tuple[int, ...]) -> None:
    base, each = 100 * step, [server if server in contributors else None for server in range(N)]
    if name == "broadcast":
        assert found[0] == base + (1 if 1 in contributors else min(contributors))
    elif name == "all_gather":
        assert rows(found) == [None if server is None else base + server for server in each]
    elif name == "gather":
        expected = [None if server is None else base + server for server in each]
        assert rows(found) == (expected if me == 1 else None)
    elif name == "all_to_all":
        assert rows(found) == [None if server is None else base + server + 10 * me for server in each]
    elif name == "reduce":
        expected = sum(base + server for server in contributors)
        assert (found is None) if me != 1 else found.tolist() == [expected, 7 * len(contributors)]
    else:
        first = sum(base + server + 10 * me for server in contributors)
        assert found.tolist() == [first, sum(7 + 10 * me for _ in contributors)]


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("call", [2, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_without_its_root_a_scatter_is_an_error_after_which_all_go_on(
    when: str, call: int, waits: bool
) -> None:
    """A scatter has two steps: server 1 dies in its first, or in its second. Another step goes before it."""

    def train(session: Any) -> Any:
        session.barrier()
        for step in session.steps(1):
            mine = [np.full(2, 10 + to) for to in range(N)] if session.server == 1 else None
            try:
                if waits:
                    handle = session.scatter_async(mine, 1)
                    begun_behind = session.allreduce_async(np.ones(1))
                    assert begun_behind.wait() >= 3
                    found = handle.wait()
                else:
                    found = session.scatter(mine, 1)
            except ContributorLost:
                if waits:
                    with pytest.raises(ContributorLost, match="server 1, the root of a scatter"):
                        handle.wait()
                found = None
            total = session.allreduce(np.array([step + 1]))
        return found, int(total[0]), session.contributors

    ends = results(train, N, dies(1, when, call))
    assert sorted(ends) == [0, 2, 3]
    lost = ends[0][0] is None
    assert when == "brought" or lost is ((call, when) != (3, "committed"))
    for me, (found, total, contributors) in ends.items():
        assert (found is None) if lost else found.tolist() == [10 + me] * 2
        assert (total, contributors) == (3, (0, 2, 3))


def test_a_scatter_that_loses_another_server_goes_well() -> None:
    def train(session: Any) -> Any:
        session.barrier()
        return session.scatter([np.full(2, 10 + to) for to in range(N)] if session.server == 1 else None, 1)

    for call in (2, 3):
        ends = results(train, N, dies(2, "brought", call))
        assert {me: found.tolist() for me, found in ends.items()} == {me: [10 + me] * 2 for me in (0, 1, 3)}


def test_a_server_that_joins_is_given_the_results_of_the_others() -> None:
    """Server 1 dies, joins again, replays and contributes; server 3 was absent. Both count as lost before."""

    def train(session: Any) -> Any:
        count = np.zeros(1)
        session.state(count=count)
        found = {}
        for step in session.steps(10**6):  # until all are there, and 24 at least
            count += 1
            me, mine = session.server, np.array([100 * step + session.server])
            got = [session.broadcast(mine, 1)]
            got.append(session.all_gather(mine))
            got.append(session.reduce(mine, 0))
            try:
                got.append(session.scatter([mine] * N if me == 1 else None, 1))
            except ContributorLost:
                got.append(None)
            session.all_to_all([mine + 1000 * to for to in range(N)])
            got.append(session.reduce_scatter([mine] * N))
            got.append(session.allreduce(mine, "avg"))
            found[step] = (session.contributors, got)
            if step >= 23 and len(session.contributors) == N:
                break
        return found

    faults = Faults(absent=(3,), kills={1: (12, "brought")}, joins=[(40, 1), (50, 3)], holds_for_joiners=True)
    ends = results(train, N, faults)
    assert sorted(ends) == [0, 1, 2, 3]
    assert min(ends[3]) > 0, "it joined later"
    for me, found in ends.items():
        for step, (contributors, (sent, gathered, total, scattered, share, mean)) in found.items():
            assert contributors == ends[0][step][0]
            values = {server: 100 * step + server for server in range(N)}
            in_all = ends[0][step][1]
            assert sent.tolist() == in_all[0].tolist()
            assert rows(gathered) == rows(in_all[1])
            assert share.tolist() == in_all[4].tolist()
            assert mean.tolist() == in_all[5].tolist() == [np.mean([values[each] for each in contributors])]
            assert (scattered is None) == (in_all[3] is None)
            assert (total is not None) == (me == 0)
    assert {each for found in ends.values() for each, _ in found.values()} >= {(0, 2), (0, 1, 2, 3)}


def test_arrays_of_the_user_take_the_result_after_the_commit() -> None:
    def train(session: Any) -> Any:
        me, x = session.server, np.arange(3.0) + session.server
        session.barrier()
        assert session.broadcast(x, 1, out=x) is x
        assert x.tolist() == [1, 2, 3]
        many = [np.full(2, -1.0) for _ in range(N)]
        got = session.all_gather(np.full(2, me, np.float64), out=many)
        assert got[2] is None
        assert all(got[server] is many[server] for server in (0, 1, 3))
        assert [int(each[0]) for each in many] == [0, 1, -1, 3], "what a lost server would bring stays"
        each = [np.array([10 * me + to]) for to in range(N)]
        session.all_to_all(each, out=each)
        assert [int(row[0]) for row in each] == [me, 10 + me, 10 * me + 2, 30 + me], "what it brought stays"
        mine = np.zeros(1, np.int64)
        assert (
            session.scatter([np.array([5 + to]) for to in range(N)] if me == 1 else None, 1, out=mine) is mine
        )
        assert mine[0] == 5 + me
        share = np.zeros(2, np.float32)
        assert session.reduce_scatter([np.full(2, to) for to in range(N)], out=share) is share
        assert share.tolist() == [3 * me] * 2
        total = np.zeros(2)
        assert session.reduce(np.full(2, 1.5), 3, out=total) is (total if me == 3 else None)
        assert total.tolist() == ([4.5] * 2 if me == 3 else [0, 0])
        at_root = [np.zeros(1) for _ in range(N)]
        session.gather(np.array([me + 0.5]), 0, out=at_root)
        assert [each[0] for each in at_root] == ([0.5, 1.5, 0, 3.5] if me == 0 else [0] * N)
        return True

    assert results(train, N, dies(2, "before")) == {0: True, 1: True, 3: True}


def test_a_bucket_is_sent_as_it_lies() -> None:
    def train(session: Any) -> Any:
        me, bucket = session.server, session.bucket([2] * N, "int32")
        brought = []
        sync = session._communicator.sync

        def spied(epoch: int, contribution: Any, *rest: Any) -> Any:
            brought.append(np.shares_memory(contribution, bucket.vector))
            return sync(epoch, contribution, *rest)

        session._communicator.sync = spied
        bucket.vector[:] = 10 * me + np.arange(N).repeat(2)
        exchanged = session.all_to_all(bucket)
        assert [each.tolist() for each in exchanged] == [[10 * server + me] * 2 for server in range(N)]
        session.broadcast(bucket, 2, out=bucket)
        assert bucket.vector.tolist() == [20, 20, 21, 21, 22, 22, 23, 23]
        wide = session.bucket([1] * N, "float64")
        wide.vector[:] = np.arange(N)
        assert session.reduce_scatter(wide).tolist() == [4.0 * me]
        return brought

    for me, (_, broadcast, _) in results(train).items():
        assert broadcast is (me == 2)


WRONG = [
    (lambda s: s.broadcast(np.ones(2), 4), "root is 4: give the id of a server, 0 to 3"),
    (lambda s: s.reduce(np.ones(2), -1), "root is -1"),
    (lambda s: s.gather(np.ones(2), 1.5), "root is 1.5"),
    (lambda s: s.scatter(None, True), "root is True"),
    (lambda s: s.all_to_all([np.ones(2)] * 3), "list of 4 arrays, one for each server: it was given 3"),
    (lambda s: s.reduce_scatter(np.ones((4, 2))), "reduce_scatter takes a list of 4 arrays"),
    (
        lambda s: s.all_to_all([np.ones(2)] * 3 + [np.ones(3)]),
        r"one shape and dtype, these are float64 \(2,\)",
    ),
    (lambda s: s.reduce_scatter([np.ones(2)] * 3 + [np.ones(2, "f4")]), "one shape and dtype.*float32"),
    (lambda s: s.broadcast(np.array([object()])), "dtype object cannot be sent"),
    (lambda s: s.all_gather(np.zeros(2, "i4,f8")), "view"),
    (lambda s: s.broadcast([]), "empty list"),
    (lambda s: s.broadcast(np.ones(2), out=np.ones(3)), r"out has shape \(3,\), the result \(2,\)"),
    (lambda s: s.broadcast(np.ones(2), out=[np.ones(2)]), "out must be one array"),
    (lambda s: s.all_gather(np.ones(2), out=np.ones((4, 2))), "out must be a list of arrays"),
    (lambda s: s.all_gather(np.ones(2), out=[np.ones(2)] * 3), "out has 3 arrays, the result 4"),
    (lambda s: s.broadcast(np.ones(2), out=np.ones(2, int)), "out has dtype int64, which cannot take"),
    (lambda s: s.broadcast(np.ones(2), out=(1.0).__class__), "out is type"),
    (lambda s: s.broadcast(np.ones(2), out=np.broadcast_to(1.0, 2)), "an array that cannot be written"),
    (lambda s: s.reduce_scatter([np.ones(2)] * 4, "mean"), "op is 'mean': give one of sum, avg, min"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_named_and_the_session_goes_on(call: Any, message: str) -> None:
    def train(session: Any) -> Any:
        with pytest.raises(UsageError, match=message):
            call(session)
        return int(session.allreduce(np.ones(1))[0])

    assert set(results(train).values()) == {N}


def test_what_a_root_may_not_scatter_is_named() -> None:
    def train(session: Any) -> None:
        session.scatter([np.ones(2)] * (3 if session.server == 0 else 4), 0)

    assert all("scatter takes a list of 4 arrays" in str(error) for error in job(train).values())


DIFFER = [
    (lambda s: s.broadcast(np.ones(2), s.server % 2), "broadcast from 0 float64.*broadcast from 1 float64"),
    (lambda s: s.reduce(np.ones(2), s.server % 2), "reduce to 0, sum float64.*reduce to 1, sum float64"),
    (lambda s: s.reduce(np.ones(2), 0, ("min", "max")[s.server % 2]), "reduce to 0, max.*reduce to 0, min"),
    (lambda s: s.gather(np.ones(2), s.server % 2), "gather to 0 .*gather to 1 "),
    (lambda s: s.scatter([np.ones(2)] * 4, s.server % 2), "scatter from 0: .*scatter from 1: "),
    (
        lambda s: s.all_gather(np.ones(2 + s.server % 2)),
        r"all_gather float64 \(2,\).*all_gather float64 \(3,\)",
    ),
    (lambda s: s.all_gather(np.ones(2, ("f8", "i8")[s.server % 2])), "all_gather float64.*all_gather int64"),
    (lambda s: s.all_gather(np.ones(2, ("<i4", ">i4")[s.server % 2])), "all_gather int32"),
    (lambda s: s.all_to_all([np.ones((2, 1 + s.server % 2))] * 4), r"all_to_all .*\(2, 1\).*\(2, 2\)"),
    (lambda s: s.reduce_scatter([np.ones(2)] * 4, ("sum", "avg")[s.server % 2]), "reduce_scatter avg.*sum"),
    (
        lambda s: s.broadcast([np.ones(2, "i4"), np.ones(1, ("f4", "i4")[s.server % 2])]),
        "of int32, float32 as uint8",
    ),
    (lambda s: s.broadcast([np.ones(2), np.ones(1 + s.server % 2)]), r"\(2,\) \(1,\).*\(2,\) \(2,\)"),
    (lambda s: s.allreduce(np.ones(2, ("f4", BFLOAT16)[s.server % 2])), "sum bfloat16.*sum float32"),
]


@pytest.mark.parametrize(("call", "message"), DIFFER, ids=[message for _, message in DIFFER])
def test_calls_that_differ_are_named_with_both_texts(call: Any, message: str) -> None:
    ends = job(call)
    assert any(isinstance(end, StepMismatch) for end in ends.values())
    for end in ends.values():
        assert isinstance(end, StepMismatch)
        text = str(end)
        assert re.search(message, text), text


CALLS = [
    lambda session, x: session.allreduce(x, "avg", out=x),
    lambda session, x: session.reduce(x, 1),
    lambda session, x: session.broadcast(x, 1),
    lambda session, x: session.all_gather(x),
    lambda session, x: session.gather(x, 1),
    lambda session, x: session.all_gather_async(x).wait(),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_contribution_is_let_go_with_its_call(call: Any) -> None:
    """Its memory is used again for other steps: it is not to wait for a garbage collection."""

    def train(session: Any) -> bool:
        x = np.zeros(3)
        seen = weakref.ref(x)
        call(session, x)
        del x
        session.barrier()
        return seen() is None or session.server == 0  # the model keeps what the lowest server brought

    gc.disable()
    try:
        assert all(results(train).values())
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "broadcast", "reduce", "scatter"])
def test_a_contribution_that_changes_is_found_in_tests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BML_DEBUG", "1")

    def train(session: Any) -> None:
        bucket = session.bucket([3] * N)
        bucket.vector[:] = 1
        handle = getattr(session, f"{name}_async")(bucket if name in ("all_to_all", "scatter") else bucket[0])
        bucket.vector[:] = 2
        handle.wait()

    ends = job(train)
    brought = [0] if name == "scatter" else range(N)
    assert all("an array was changed before its step was committed" in str(ends[each]) for each in brought)
