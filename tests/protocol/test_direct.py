"""Direct reduction: shares tile the vector, stages in any order of arrival, nothing of an old epoch."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bml.errors import Evicted
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.step.dataflow import Stamp
from bml.protocol.step.direct import DirectEngine, Post, Quit, Stage, Sum, epoch_of, standing, standings
from bml.protocol.step.exchange import engine_for
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import Call
from bml.protocol.wire.frame import FrameError, Kind
from bml.schedule import DirectProgram, OneProgram
from bml.topology import parse

members = st.lists(st.integers(0, 300), min_size=1, max_size=20, unique=True).map(lambda m: tuple(sorted(m)))


@pytest.mark.slow
@given(members, st.integers(0, 100_000), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_shares_tile_the_vector_at_pages(servers: tuple[int, ...], n: int, itemsize: int) -> None:
    at = 0
    for server in servers:
        program = DirectProgram(server, servers)
        start, stop = program.share(n, itemsize)
        assert start == at
        assert start * itemsize % 4096 == 0 or start == n
        assert stop - start <= program.share_elements(n, itemsize)
        at = stop
    assert at == n


@pytest.mark.parametrize(
    ("n", "in_place", "most_nbytes"),
    [(1, False, None), (2, False, None), (2, True, 699_050), (3, False, 1 << 20), (9, False, 149_796)],
)
def test_the_whole_is_added_where_that_moves_fewer_bytes(
    n: int, in_place: bool, most_nbytes: int | None
) -> None:
    program = DirectProgram(0, tuple(range(n)))
    assert program.adds_whole(0, in_place)
    assert program.adds_whole(most_nbytes or 1 << 36, in_place)
    assert most_nbytes is None or not program.adds_whole(most_nbytes + 1, in_place)


class Room:
    """The servers of one step; `chance` draws the server that acts next, on the words that it sees."""

    def __init__(self, servers: tuple[int, ...], n: int, meeting_nbytes: int, chance: random.Random):
        self.inputs = {server: np.random.default_rng(server).standard_normal(n) for server in servers}
        self.shares = {server: np.full(n, np.nan) for server in servers}
        self.results = {server: np.full(n, np.nan) for server in servers}
        self.engines: dict[int, DirectEngine] = {}
        self.standing = dict.fromkeys(servers, 0)
        self.todo: dict[int, list[Post | Sum]] = {}
        self.waits: dict[int, Post] = {}
        self.committed: set[int] = set()
        self.chance, self.servers = chance, servers
        self.whole = False
        self.in_place = chance.random() < 0.5
        for server in servers:
            engine = engine_for(
                DirectProgram(server, servers, 8, meeting_nbytes), Stamp(4, 9, 1, 8), n, slice_elements=7
            )
            assert isinstance(engine, DirectEngine)
            self.engines[server] = engine
            self.todo[server] = list(engine.start())

    def act(self, server: int) -> None:
        engine = self.engines[server]
        if server in self.waits:
            self._look(server)
        elif self.todo[server]:
            match self.todo[server].pop(0):
                case Post() as post:
                    assert post.stage is not Stage.COMPLETE or engine.complete
                    self.standing[server] = standing(*post)
                    self.waits[server] = post
                    if post.stage is Stage.COMPLETE:
                        self._fetch(server)
                case Sum() as done:
                    self.sum = done
                    self.whole = done.adds_whole(self.in_place)
                    out = self.results[server] if self.whole else self.shares[server]
                    start, stop = (0, len(out)) if self.whole else (done.start, done.stop)
                    parts = [self.inputs[each][start:stop] for each in done.members]
                    out[start:stop] = sum(parts[1:], parts[0])
                    self.todo[server] += engine.summed(self.whole)

    def _look(self, server: int) -> None:
        low, high = standings(*self.waits[server])
        if all(low <= each < high for each in self.standing.values()):
            stage = self.waits.pop(server).stage
            if stage is Stage.COMPLETE:
                self.committed.add(server)
            elif not self.todo[server]:
                self.todo[server] += self.engines[server].gathered(stage)

    def _fetch(self, server: int) -> None:
        if not self.whole:
            for index, owner in enumerate(self.servers):
                part = slice(index * self.sum.share, (index + 1) * self.sum.share)
                self.results[server][part] = self.shares[owner][part]

    def run(self) -> None:
        while len(self.committed) < len(self.servers):
            self.act(self.chance.choice(self.servers))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    members.filter(lambda m: len(m) <= 9),
    st.integers(0, 60),
    st.sampled_from([0, 400, 10**6]),
    st.integers(0, 10**6),
)
def test_any_order_gives_all_servers_the_same_bits(
    servers: tuple[int, ...], n: int, whole: int, seed: int
) -> None:
    room = Room(servers, n, whole, random.Random(seed))
    room.run()
    right = sum((room.inputs[server] for server in servers[1:]), room.inputs[servers[0]])
    for server in servers:
        assert room.results[server].tobytes() == right.tobytes()
        assert room.engines[server].progress == 1.0
        assert room.engines[server].remaining == 0


def test_standings_grow_and_later_epochs_do_not_count() -> None:
    low, high = standings(3, 7, Stage.DONE)
    beyond = [standing(3, 7, Stage.DONE), standing(3, 7, Stage.COMPLETE), standing(3, 8, Stage.READY)]
    assert all(low <= each < high for each in beyond)
    others = [standing(3, 7, Stage.READY), standing(2, 9, Stage.COMPLETE), standing(4, 7, Stage.DONE)]
    assert not any(low <= each < high for each in others)


def test_no_frame_belongs_into_shared_memory() -> None:
    engine = DirectEngine(DirectProgram(0, (0, 1)), Stamp(1, 1, 1, 8), 5)
    with pytest.raises(FrameError, match="shares memory"):
        engine.place(Kind.REDUCE, 1, 0, 0, 5)


# --- the core ------------------------------------------------------------------------------------

N = 200_000


@pytest.fixture
def core() -> ServerCore:
    """Server 0 of two, in view 1, with step 1 submitted."""
    fabric = parse("bcube:2x1")
    made = ServerCore(
        0,
        fabric,
        lambda f, server: OneProgram(DirectProgram(server, f.servers)),
        Timeouts.of(0.5),
        lambda nbytes: 1 << 18,
        0.0,
    )
    view = msg.View(epoch=1, members=(0, 1), failures=(), commit=0, reason="start", noticed_s=0.0)
    for message in (msg.Freeze(0, 1, "why"), msg.Propose(0, view), msg.Install(0, 1)):
        made.handle(ev.Control(message), 0.0)
    done = made.handle(ev.Submit(1, 1, Call("sum", "<f8", N, "allreduce"), 77), 0.0)
    assert done[-2:] == [Post(1, 1, Stage.READY), Sum(1, 1, 0, 100_352, 100_352, True, False, (0, 1))]
    assert not [one for one in done if isinstance(one, ev.SendText)]
    return made


def meet(core: ServerCore, stage: Stage, epoch: int = 1, step: int = 1) -> list[ev.Instruction]:
    return core.handle(ev.Gathered(epoch, step, stage), 0.0)


def test_a_step_goes_through_its_stages(core: ServerCore) -> None:
    assert core.phase == "compute"
    assert core.handle(ev.Summed(1, 1, whole=False), 0.0) == [Post(1, 1, Stage.DONE)]
    assert core.phase == "reduce"
    assert meet(core, Stage.DONE) == [Post(1, 1, Stage.COMPLETE)]
    assert core.phase == "complete"
    assert "servers [1]" in core.waits_for()
    assert ev.Commit(1, 1, (0, 1)) in meet(core, Stage.COMPLETE)
    assert core.committed == 1


def test_a_server_that_has_added_the_whole_is_complete(core: ServerCore) -> None:
    assert core.handle(ev.Summed(1, 1, whole=True), 0.0) == [Post(1, 1, Stage.COMPLETE)]
    assert core.phase == "complete"


def test_a_frozen_server_posts_nothing_and_does_not_commit(core: ServerCore) -> None:
    core.handle(ev.Summed(1, 1, whole=False), 0.0)
    core.handle(ev.Control(msg.Freeze(0, 2, "why")), 0.0)
    assert meet(core, Stage.DONE) == []
    assert core.handle(ev.Summed(1, 1, whole=True), 0.0) == []


def frozen_complete(core: ServerCore) -> None:
    """All have completed step 1; server 0 says so, and accepts view 2, which commits it: with server 1."""
    core.handle(ev.Summed(1, 1, whole=False), 0.0)
    meet(core, Stage.DONE)
    told = core.handle(ev.Control(msg.Freeze(0, 2, "why")), 0.0)
    assert [one.message.complete for one in told if isinstance(one, ev.Tell)] == [1]
    assert meet(core, Stage.COMPLETE) == []
    core.handle(ev.Control(msg.Propose(0, view(2))), 0.0)


def view(epoch: int) -> msg.View:
    return msg.View(epoch=epoch, members=(0, 1), failures=(), commit=1, reason="", noticed_s=0.0)


def index(instructions: list[ev.Instruction], one: ev.Instruction) -> int:
    assert one in instructions, instructions
    return instructions.index(one)


def test_a_view_commits_a_step_when_its_result_is_fetched_and_no_server_is_further(core: ServerCore) -> None:
    frozen_complete(core)
    done = core.handle(ev.Control(msg.Install(0, 2)), 0.0)
    assert index(done, Quit(2)) < index(done, ev.FetchResult(1, 1, follows=False))
    assert not [one for one in done if isinstance(one, ev.Commit)]
    assert core.committed == 1
    assert "result of step 1" in core.waits_for()
    assert ev.Commit(1, 1, (0, 1)) in core.handle(ev.ResultFetched(1, 1, newest=2), 0.0)
    assert core.handle(ev.ResultFetched(1, 1, newest=2), 0.0) == []
    assert not core.in_doubt


def test_a_result_that_may_be_torn_waits_for_the_view_that_is_missing(core: ServerCore) -> None:
    frozen_complete(core)
    core.handle(ev.Control(msg.Install(0, 2)), 0.0)
    assert core.handle(ev.ResultFetched(1, 1, newest=3), 0.0) == []
    core.handle(ev.Control(msg.Freeze(0, 3, "why")), 0.0)
    core.handle(ev.Control(msg.Propose(0, view(3))), 0.0)
    assert core.in_doubt
    done = core.handle(ev.Control(msg.Install(0, 3)), 0.0)
    assert index(done, Quit(3)) < index(done, ev.FetchResult(1, 1, follows=False))
    assert ev.Commit(1, 1, (0, 1)) in core.handle(ev.ResultFetched(1, 1, newest=3), 0.0)


def test_a_view_that_comes_before_the_result_is_home_asks_no_second_time(core: ServerCore) -> None:
    frozen_complete(core)
    core.handle(ev.Control(msg.Install(0, 2)), 0.0)
    core.handle(ev.Control(msg.Freeze(0, 3, "why")), 0.0)
    core.handle(ev.Control(msg.Propose(0, view(3))), 0.0)
    done = core.handle(ev.Control(msg.Install(0, 3)), 0.0)
    assert ev.FetchResult(1, 1, follows=False) not in done
    assert ev.Commit(1, 1, (0, 1)) in core.handle(ev.ResultFetched(1, 1, newest=3), 0.0)


@pytest.mark.parametrize("looks_before", [True, False])
def test_an_evicted_server_gives_out_nothing_that_may_be_torn(core: ServerCore, looks_before: bool) -> None:
    frozen_complete(core)
    core.handle(ev.Control(msg.Install(0, 2)), 0.0)
    if looks_before:
        core.handle(ev.ResultFetched(1, 1, newest=3), 0.0)
    done = core.handle(ev.Control(msg.Evict(0, 3, "silent")), 0.0)
    (stop,) = [one for one in done if isinstance(one, ev.Stop)]
    assert isinstance(stop.error, Evicted)
    assert index(done, Quit(3)) < index(done, stop)
    assert core.handle(ev.ResultFetched(1, 1, newest=3), 0.0) == []


def test_a_server_in_doubt_for_too_long_says_that_it_needs_a_view(core: ServerCore) -> None:
    frozen_complete(core)
    core.handle(ev.Control(msg.Install(0, 2)), 0.0)
    core.handle(ev.ResultFetched(1, 1, newest=3), 0.0)
    for now in (1.0, 2.0 + core.timeouts.orphan_s):
        core.heard(1, 0, now)
        done = core.handle(ev.Tick(), now)
    (stop,) = [one for one in done if isinstance(one, ev.Stop)]
    assert "waits for the result of step 1 to be fetched" in str(stop.error)


def test_a_server_that_retries_has_let_all_see_that_its_epoch_is_over(core: ServerCore) -> None:
    """Its contribution may be written again, and others may still read it."""
    core.handle(ev.Control(msg.Freeze(0, 2, "why")), 0.0)
    nothing = msg.View(epoch=2, members=(0, 1), failures=(), commit=0, reason="", noticed_s=0.0)
    core.handle(ev.Control(msg.Propose(0, nothing)), 0.0)
    done = core.handle(ev.Control(msg.Install(0, 2)), 0.0)
    assert index(done, Quit(2)) < index(done, ev.Retry(1, 2))
    low, high = standings(1, 1, Stage.COMPLETE)
    assert not low <= standing(2, 0, Stage.NONE) < high
    assert epoch_of(standing(2, 0, Stage.NONE)) == 2


def test_events_of_another_epoch_or_step_are_ignored(core: ServerCore) -> None:
    assert meet(core, Stage.DONE, epoch=2) == []
    assert meet(core, Stage.DONE, step=2) == []
    assert core.handle(ev.CallDiffers(2, 1, 1, "barrier"), 0.0) == []


def test_another_call_is_named(core: ServerCore) -> None:
    done = core.handle(ev.CallDiffers(1, 1, 1, "barrier"), 0.0)
    (stop,) = [one for one in done if isinstance(one, ev.Stop)]
    assert "server 1 called barrier, but server 0 called allreduce" in str(stop.error)


def joiner() -> ServerCore:
    return ServerCore(
        2,
        parse("bcube:3x1"),
        lambda f, server: OneProgram(DirectProgram(server, f.servers)),
        Timeouts.of(0.5),
        lambda nbytes: 1 << 18,
        0.0,
        msg.Incarnation(2, 1),
    )


@pytest.mark.parametrize(("outcome", "leaves"), [("failed", True), ("done", False)])
def test_a_joiner_that_fails_before_it_is_in_leaves_at_once(outcome: str, leaves: bool) -> None:
    """The launcher would hear of its end only with the job's, and could not start it again."""
    instructions = joiner().handle(ev.Ended(outcome, "why"), 0.0)
    assert instructions[0] == ev.Tell(msg.Ended(2, outcome, "why", 0))
    assert [type(each) for each in instructions[1:]] == [ev.Exit] * leaves


def test_a_learner_follows_only_calls_of_the_view_in_force() -> None:
    """A contribution that the training thread makes for an older view is tried again in the new one."""
    core = joiner()

    def install(epoch: int) -> None:
        joined = (msg.Incarnation(2, 1),)
        view = msg.View(epoch, (0, 1, 2), (), 4, "", 0.0, learners=(2,), joined=joined)
        for message in (msg.Freeze(0, epoch, "why"), msg.Propose(0, view), msg.Install(0, epoch)):
            core.handle(ev.Control(message), 0.0)

    def follow(step: int, epoch: int) -> list[ev.Instruction]:
        call = Call("sum", "<f8", N, "allreduce")
        return core.handle(ev.Follow(ev.Submit(step, epoch, call, 77)), 0.0)

    install(1)
    install(2)
    assert follow(5, 1) == []
    assert follow(4, 2) == []
    assert follow(6, 2) == []
    begun = follow(5, 2)
    assert [(each.epoch, each.step) for each in begun if isinstance(each, Post)] == [(2, 5)]
    assert follow(5, 2) == [], "it is under way"
