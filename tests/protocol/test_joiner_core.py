"""The core of a server that joins: evictions, and frames with the training state."""

from __future__ import annotations

import pytest

from bml.errors import Evicted, StateMismatch
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.server.transfer import Head, Part
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import Call
from bml.protocol.wire.frame import FrameError, Header, Kind
from bml.protocol.wire.validate import check_from_server
from bml.schedule import Programs, Schedules
from bml.topology import Fabric, parse

ME, DONOR, EPOCH = 2, 0, 1
FABRIC = parse("bcube:3x1")


def programs(fabric: Fabric, server: int) -> Programs:
    return Programs(Schedules(fabric, "packed"), server)


def joiner() -> ServerCore:
    """Before any view."""
    return ServerCore(
        ME, FABRIC, programs, Timeouts.of(0.5), lambda nbytes: 1 << 16, 0.0, msg.Incarnation(ME, 1)
    )


def learner(epoch: int = EPOCH) -> ServerCore:
    """A member of a view that contributes nothing yet."""
    core = joiner()
    install(core, epoch)
    return core


def install(core: ServerCore, epoch: int) -> None:
    view = msg.View(epoch, (0, 1, 2), (), 4, "", 0.0, learners=(ME,), joined=(msg.Incarnation(ME, 1),))
    for message in (msg.Freeze(0, epoch, "why"), msg.Propose(0, view), msg.Install(0, epoch)):
        core.handle(ev.Control(message), 0.0)


def head_frame(dest: int = ME) -> Header:
    return Header(Kind.HEAD, EPOCH, 4, DONOR, dest, 0, 0, 10, 10)


def told_to_go(core: ServerCore) -> list[msg.ToCoordinator]:
    """What the server says when it is evicted."""
    done = core.handle(ev.Control(msg.Evict(0, 3, "no answer within 0.75 s")), 0.0)
    assert all(isinstance(each, ev.Tell) for each in done), "it waits on"
    return [each.message for each in done if isinstance(each, ev.Tell)]


def test_an_eviction_before_the_first_view_is_waited_out() -> None:
    assert told_to_go(joiner()) == [], "it may still be importing: it has not asked yet"


def test_a_joiner_that_is_left_out_of_a_view_asks_again_to_be_let_in() -> None:
    """The coordinator forgets a joiner that accepts a view too late; nothing else would remind it."""
    core = joiner()
    core.handle(ev.Ready(), 0.0)
    core.handle(ev.Control(msg.Freeze(0, 2, "why")), 0.0)
    (said,) = told_to_go(core)
    assert isinstance(said, msg.Status)
    assert (said.ready, said.installed, said.incarnation) == (True, None, msg.Incarnation(ME, 1))
    assert told_to_go(core) == [], "once for each view: the coordinator may say it as an answer"


@pytest.mark.parametrize("event", [ev.Ended("done", ""), ev.Leaving("asked to")])
def test_a_joiner_that_goes_does_not_ask_again(event: ev.Event) -> None:
    core = joiner()
    core.handle(ev.Ready(), 0.0)
    core.handle(event, 0.0)
    assert told_to_go(core) == []


def test_a_learner_that_is_evicted_ends() -> None:
    done = learner().handle(ev.Control(msg.Evict(0, 3, "silent")), 0.0)
    assert [type(each.error) for each in done if isinstance(each, ev.Stop)] == [Evicted]


def test_state_for_another_server_is_dropped() -> None:
    core = learner()
    assert core.admit(DONOR, head_frame()) is ev.Verdict.TEXT
    assert core.admit(DONOR, head_frame(dest=1)) is ev.Verdict.DROP


def test_state_of_an_epoch_that_ended_while_it_came_counts_no_more() -> None:
    text = Head(10, Part(0, 1, 4), "0" * 64, "0").encode().decode()
    assert learner().received(DONOR, head_frame(), text, 0.0)
    core = learner()
    assert core.admit(DONOR, head_frame()) is ev.Verdict.TEXT
    install(core, EPOCH + 1)
    assert core.received(DONOR, head_frame(), text, 0.0) == []


def test_donors_whose_states_differ_end_the_joiner_and_no_connection() -> None:
    core = learner()
    assert core.received(DONOR, head_frame(), Head(10, Part(0, 2, 4), "0", "a").encode().decode(), 0.0)
    done = core.received(DONOR, head_frame(), Head(10, Part(1, 2, 4), "0", "b").encode().decode(), 0.0)
    assert [type(each.error) for each in done if isinstance(each, ev.Stop)] == [StateMismatch]
    told = [each.message for each in done if isinstance(each, ev.Tell)]
    assert [type(each) for each in told] == [msg.Leaves]


@pytest.mark.parametrize("text", ["sum <q9 3\nx", "sum <f4 three\nx", "sum <f4\nx", "sub <f4 3\nx", ""])
def test_a_text_that_describes_no_call_is_refused(text: str) -> None:
    with pytest.raises(FrameError, match="no description of a call"):
        Call.decode(text)


@pytest.mark.parametrize(("observer", "peer", "level"), [(ME, 7, 0), (ME, -1, 0), (ME, 1, 5), (ME, 1, -1)])
def test_suspicions_of_links_that_are_not_there_are_refused(observer: int, peer: int, level: int) -> None:
    with pytest.raises(msg.MessageError, match="no link"):
        check_from_server(msg.Withdraw(observer, peer, level), observer, FABRIC)
