"""One server's core, event by event: steps, fencing, waiting, membership, suspicion, errors."""

from __future__ import annotations

from typing import Any

import pytest

from bml.errors import Evicted, StepMismatch, TooFewServers, TrainingError
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.step.dataflow import Buffer, Place, Reduce, Send
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import Call
from bml.protocol.wire.frame import FrameError, Header, Kind
from bml.schedule import Programs, Schedules
from bml.topology import Fabric, parse
from bml.topology.errors import InvariantError

ME, PEER = 0, 1
SIGNATURE = 77


def programs(fabric: Fabric, server: int) -> Programs:
    return Programs(Schedules(fabric, "packed"), server)


class Driver:
    """Server 0 of `bcube:2x1` or larger, with everything that it said."""

    def __init__(self, fabric: str = "bcube:2x1", term: int = 1):
        self.fabric = parse(fabric)
        self.core = ServerCore(ME, self.fabric, programs, Timeouts.of(0.5), lambda nbytes: 1 << 16, 0.0)
        self.now = 0.0
        self.term = term
        self.said: list[ev.Instruction] = []

    def warm_up(self) -> None:
        """The first steps are over, in no time."""
        for step in range(1, 3):
            self.submit(step)
            self.complete()
            only(ev.Commit, self.token())

    def give(self, event: ev.Event) -> list[ev.Instruction]:
        done = self.core.handle(event, self.now)
        self.said += done
        return done

    def told(self, message: msg.ToServer) -> list[ev.Instruction]:
        return self.give(ev.Control(message))

    def view(self, epoch: int, commit: int = 0, failures: tuple[str, ...] = ()) -> msg.View:
        members = self.fabric.without(*failures).servers
        return msg.View(epoch, members, failures, commit, "test", 0.0)

    def accept(self, epoch: int, commit: int = 0, failures: tuple[str, ...] = ()) -> list[ev.Instruction]:
        """Freeze and Propose."""
        done = self.told(msg.Freeze(self.term, epoch, "test"))
        return done + self.told(msg.Propose(self.term, self.view(epoch, commit, failures)))

    def install(self, epoch: int, commit: int = 0, failures: tuple[str, ...] = ()) -> list[ev.Instruction]:
        self.accept(epoch, commit, failures)
        return self.told(msg.Install(self.term, epoch))

    def submit(self, step: int = 1, epoch: int | None = None, n: int = 10, text: str = "sum f64 10") -> Any:
        at = self.core.epoch if epoch is None else epoch
        return self.give(ev.Submit(step, at, Call("sum", "<f8", n, text), SIGNATURE))

    def frame(self, kind: Kind, start: int, stop: int, **other: int) -> Header:
        """A frame of PEER for the step of now."""
        stands = {"epoch": self.core.epoch, "step": self.core.step, "signature": SIGNATURE, **other}
        nbytes = other.get("nbytes", 0 if kind == Kind.TOKEN else (stop - start) * 8)
        return Header(
            kind, stands["epoch"], stands["step"], PEER, ME, stands["signature"], start, stop, nbytes
        )

    def receive(self, header: Header) -> list[ev.Instruction]:
        verdict = self.core.admit(PEER, header)
        assert isinstance(verdict, Place) or verdict is ev.Verdict.TOKEN, verdict
        done = self.core.received(PEER, header, "", self.now)
        self.said += done
        return done

    def complete(self) -> list[ev.Instruction]:
        """All slices of PEER: bcube:2x1 and 10 elements."""
        return self.receive(self.frame(Kind.REDUCE, 0, 5)) + self.receive(self.frame(Kind.BROADCAST, 5, 10))

    def token(self) -> list[ev.Instruction]:
        return self.receive(self.frame(Kind.TOKEN, 0, 0))


def only(kind: type, done: list[Any]) -> Any:
    found = [one for one in done if isinstance(one, kind)]
    assert len(found) == 1, done
    return found[0]


def none(kind: type, done: list[Any]) -> None:
    assert not [one for one in done if isinstance(one, kind)], done


@pytest.fixture
def running() -> Driver:
    """In view 1, no step submitted."""
    driver = Driver()
    driver.install(1)
    return driver


# --- a step ----------------------------------------------------------------------------------------


def test_a_fault_free_step(running: Driver) -> None:
    done = running.submit()
    assert only(ev.Open, done).scratch_elements == 0
    assert {one.header.kind for one in done if isinstance(one, Send)} == {Kind.REDUCE}
    none(ev.Commit, running.complete())
    assert running.core.waits_for() == "barrier tokens of step 1 from servers [1]"
    assert only(ev.Commit, running.token()) == ev.Commit(1, 1, (0, 1))
    assert running.core.committed == 1
    assert running.core.step == 2


def test_it_does_not_commit_before_the_others_token(running: Driver) -> None:
    running.submit()
    none(ev.Commit, running.complete())
    assert running.core.committed == 0


def test_it_does_not_commit_before_it_is_complete_itself(running: Driver) -> None:
    running.submit()
    none(ev.Commit, running.token())
    assert running.core.waits_for() == "slices of step 1: 10 elements are not final"
    only(ev.Commit, running.complete())


def test_its_token_goes_out_only_when_it_is_complete(running: Driver) -> None:
    running.submit()
    first = running.receive(running.frame(Kind.REDUCE, 0, 5))
    assert [one.header.kind for one in first if isinstance(one, Send)] == [Kind.BROADCAST]
    second = running.receive(running.frame(Kind.BROADCAST, 5, 10))
    assert [one.header.kind for one in second if isinstance(one, Send)] == [Kind.TOKEN]


@pytest.mark.parametrize("n", [0, 1])
def test_short_vectors_still_pass_the_barrier(running: Driver, n: int) -> None:
    running.submit(n=n)
    if n:
        running.receive(running.frame(Kind.BROADCAST, 0, 1))
    only(ev.Commit, running.token())


def test_steps_must_come_in_order(running: Driver) -> None:
    with pytest.raises(InvariantError, match="step 2 submitted, 1 is next"):
        running.submit(step=2)


def test_a_step_that_runs_is_not_begun_again(running: Driver) -> None:
    """Its frames would come twice, and slices that were added already would be added again."""
    running.submit()
    with pytest.raises(InvariantError, match="step 1 submitted, and it runs"):
        running.submit()


def test_a_step_that_waits_for_a_view_is_not_submitted_again(running: Driver) -> None:
    running.told(msg.Freeze(1, 2, "test"))
    assert running.submit() == []
    with pytest.raises(InvariantError, match="step 1 submitted, and it runs"):
        running.submit()


def test_a_contribution_for_another_view_is_sent_back(running: Driver) -> None:
    running.install(2)
    assert running.submit(epoch=1) == [ev.Retry(1, 2)]


def test_a_contribution_that_comes_while_frozen_is_sent_back_with_the_new_view(running: Driver) -> None:
    running.told(msg.Freeze(1, 2, "test"))
    assert running.submit() == []
    assert running.core.waits_for() == "the coordinator's view after epoch 1"
    running.told(msg.Propose(1, running.view(2)))
    assert only(ev.Retry, running.told(msg.Install(1, 2))) == ev.Retry(1, 2)


def test_the_phase_before_the_first_view_is_start_once_a_coordinator_is_known() -> None:
    """Fault plans strike in it; before, no server would miss this one."""
    driver = Driver()
    assert driver.core.phase == ""
    driver.told(msg.Who(driver.term))
    assert driver.core.phase == "start"
    driver.install(1)
    assert driver.core.phase == "compute"
    driver.told(msg.Freeze(driver.term, 2, "test"))
    assert driver.core.phase == "recovery"


def test_the_phases_of_a_step_and_of_the_end(running: Driver) -> None:
    assert running.core.phase == "compute"
    running.submit()
    assert running.core.phase == "compute", "nothing has come yet"
    running.receive(running.frame(Kind.REDUCE, 0, 5))
    assert running.core.phase == "reduce"
    running.receive(running.frame(Kind.BROADCAST, 5, 10))
    assert running.core.phase == "complete"
    running.token()
    running.give(ev.Ended("done"))
    assert running.core.phase == "shutdown"
    running.told(msg.Abort(running.term, "training", "no", 1))
    assert running.core.phase == ""


def test_progress_is_the_share_that_has_arrived(running: Driver) -> None:
    assert running.core.progress is None
    running.submit()
    assert running.core.progress == 0.0
    running.receive(running.frame(Kind.REDUCE, 0, 5))
    assert running.core.progress == 0.5


# --- frames: fencing and waiting -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.REDUCE, Kind.BROADCAST, Kind.TOKEN, Kind.DESCRIBE])
def test_older_epochs_are_fenced(running: Driver, kind: Kind) -> None:
    running.install(2)
    running.submit()
    stop = 0 if kind == Kind.TOKEN else 5
    assert running.core.admit(PEER, running.frame(kind, 0, stop, epoch=1)) is ev.Verdict.DROP


@pytest.mark.parametrize("kind", [Kind.REDUCE, Kind.BROADCAST, Kind.TOKEN, Kind.DESCRIBE])
def test_a_frozen_server_takes_nothing_of_its_epoch(running: Driver, kind: Kind) -> None:
    running.submit()
    running.told(msg.Freeze(1, 2, "test"))
    stop = 0 if kind == Kind.TOKEN else 5
    assert running.core.admit(PEER, running.frame(kind, 0, stop)) is ev.Verdict.DROP


def test_a_payload_that_was_half_read_when_it_froze_changes_nothing(running: Driver) -> None:
    """It has reported that it is not complete: a token now could let another server pass the old barrier."""
    running.submit()
    running.receive(running.frame(Kind.REDUCE, 0, 5))
    header = running.frame(Kind.BROADCAST, 5, 10)
    assert isinstance(running.core.admit(PEER, header), Place)
    status = only(ev.Tell, running.told(msg.Freeze(1, 2, "test"))).message
    assert status.complete == -1
    assert running.core.received(PEER, header, "", 0.0) == []


def test_frames_of_a_later_epoch_wait(running: Driver) -> None:
    running.submit()
    assert running.core.admit(PEER, running.frame(Kind.REDUCE, 0, 5, epoch=2)) is ev.Verdict.WAIT


def test_frames_that_come_before_the_users_step_wait(running: Driver) -> None:
    early = running.frame(Kind.REDUCE, 0, 5)
    assert running.core.admit(PEER, early) is ev.Verdict.WAIT
    only(ev.Resume, running.submit())
    assert running.core.admit(PEER, early) == Place(Buffer.OUT, 0)


def test_frames_of_the_next_step_wait_and_those_of_a_committed_one_are_dropped(running: Driver) -> None:
    running.submit()
    assert running.core.admit(PEER, running.frame(Kind.REDUCE, 0, 5, step=2)) is ev.Verdict.WAIT
    running.complete()
    running.token()
    assert running.core.admit(PEER, running.frame(Kind.REDUCE, 0, 5, step=1)) is ev.Verdict.DROP


def test_frames_that_do_not_belong_are_errors(running: Driver) -> None:
    running.submit()
    for header in (
        running.frame(Kind.REDUCE, 5, 10),
        running.frame(Kind.BROADCAST, 0, 5),
        running.frame(Kind.BROADCAST, 5, 11),
        running.frame(Kind.REDUCE, 0, 5, nbytes=20),  # of another element size
    ):
        with pytest.raises(FrameError):
            running.core.admit(PEER, header)


# --- different calls on different servers ----------------------------------------------------------


def test_a_mismatch_names_both_calls(running: Driver) -> None:
    running.submit(text="allreduce float32 10")
    text = "allreduce float32 12"
    describe = running.frame(Kind.DESCRIBE, 0, len(text), signature=5, nbytes=len(text))
    assert running.core.admit(PEER, describe) is ev.Verdict.TEXT
    assert running.core.received(PEER, describe, text, 0.0) == []
    assert running.core.admit(PEER, running.frame(Kind.REDUCE, 0, 5, signature=5)) is ev.Verdict.DROP
    assert running.core.urgent
    error = only(ev.Stop, running.give(ev.Tick())).error
    assert isinstance(error, StepMismatch)
    assert str(error) == (
        "step 1: server 1 called allreduce float32 12, but server 0 called allreduce float32 10; "
        "every server must make the same calls with the same shapes and dtypes"
    )
    assert only(ev.Stop, running.submit()).error is error
    assert not running.core.urgent


def test_no_step_waits_for_a_server_whose_training_function_returned(running: Driver) -> None:
    running.submit(text="allreduce float32 10")
    assert running.told(msg.Returned(1, PEER, 1)) == []  # after the step that is under way here
    error = only(ev.Stop, running.told(msg.Returned(1, PEER, 0))).error
    assert isinstance(error, StepMismatch)
    assert str(error) == (
        "step 1: server 0 called allreduce float32 10, but the training function of server 1 returned after "
        "step 0; every server must make the same calls"
    )
    assert running.told(msg.Returned(1, PEER, 0)) == []


def test_a_server_that_returned_and_is_lost_is_not_awaited(running: Driver) -> None:
    running.told(msg.Returned(1, PEER, 0))
    running.install(2, failures=(f"server:{PEER}",))
    none(ev.Stop, running.submit())


def test_a_step_that_begins_when_a_function_has_returned_is_a_mismatch(running: Driver) -> None:
    running.told(msg.Returned(1, PEER, 0))
    running.submit()
    assert running.core.urgent
    assert isinstance(only(ev.Stop, running.give(ev.Tick())).error, StepMismatch)


def test_a_token_with_another_signature_is_a_mismatch_too(running: Driver) -> None:
    running.submit()
    assert running.core.admit(PEER, running.frame(Kind.TOKEN, 0, 0, signature=5)) is ev.Verdict.DROP
    assert "something else" in str(only(ev.Stop, running.give(ev.Tick())).error)


def test_a_call_is_told_once_a_view(running: Driver) -> None:
    assert only(ev.SendText, running.submit()).text == b"sum <f8 10\nsum f64 10"
    running.complete()
    running.token()
    none(ev.SendText, running.submit(step=2))
    running.install(2, commit=1)
    only(ev.SendText, running.submit(step=2))


def test_texts_are_bounded(running: Driver) -> None:
    for signature in range(1000):
        describe = running.frame(Kind.DESCRIBE, 0, 3, signature=signature, nbytes=3)
        running.core.received(PEER, describe, "abc", 0.0)
    assert len(running.core._calls._texts) <= 8


# --- views -----------------------------------------------------------------------------------------


def test_the_first_view_starts_everything() -> None:
    driver = Driver()
    assert driver.core.waits_for() == "the coordinator's view after epoch 0"
    status = only(ev.Tell, driver.told(msg.Who(1))).message
    assert (status.installed, status.accepted, status.promised, status.epoch) == (None, None, 0, 0)
    done = driver.install(1)
    assert [type(one) for one in done] == [ev.Installed, ev.Links, ev.Resume]
    assert driver.core.view == driver.view(1)


def test_install_commits_a_complete_step_that_the_view_commits(running: Driver) -> None:
    running.submit()
    running.complete()
    running.now = 3.0
    status = next(
        one.message
        for one in running.accept(2, commit=1)
        if isinstance(getattr(one, "message", 0), msg.Status)
    )
    assert (status.committed, status.complete) == (0, 1)
    assert only(ev.Commit, running.told(msg.Install(1, 2))) == ev.Commit(1, 1, (0, 1))


def test_install_retries_a_step_that_the_view_does_not_commit(running: Driver) -> None:
    running.submit()
    running.complete()
    done = running.install(2, commit=0)
    none(ev.Commit, done)
    assert only(ev.Retry, done) == ev.Retry(1, 2)
    only(ev.Open, running.submit())


def test_installing_a_view_that_commits_an_incomplete_step_is_a_bug(running: Driver) -> None:
    running.submit()
    running.accept(2, commit=1)
    with pytest.raises(InvariantError, match="incomplete"):
        running.told(msg.Install(1, 2))


def test_freeze_fences_before_it_reports(running: Driver) -> None:
    running.submit()
    fence, tell = running.told(msg.Freeze(1, 2, "test"))
    assert fence == ev.Fence()
    assert tell.message.epoch == 2


def test_a_frame_of_a_new_epoch_proves_that_it_was_installed(running: Driver) -> None:
    running.submit()
    running.accept(2)
    early = running.frame(Kind.REDUCE, 0, 5, epoch=2)
    assert running.core.admit(PEER, early) is ev.Verdict.WAIT
    assert running.core.urgent
    done = running.give(ev.Tick())
    assert only(ev.Installed, done).view == running.view(2)
    assert only(ev.Retry, done) == ev.Retry(1, 2)
    none(ev.Installed, running.told(msg.Install(1, 2)))


def test_a_frame_of_a_new_epoch_proves_nothing_without_acceptance(running: Driver) -> None:
    running.told(msg.Freeze(1, 2, "test"))
    running.core.admit(PEER, running.frame(Kind.REDUCE, 0, 5, epoch=2))
    assert not running.core.urgent
    none(ev.Installed, running.give(ev.Tick()))


def test_a_frame_of_an_accepted_epoch_proves_nothing_after_a_newer_promise(running: Driver) -> None:
    running.accept(2)
    running.told(msg.Freeze(1, 3, "test"))
    running.core.admit(PEER, running.frame(Kind.REDUCE, 0, 5, epoch=2))
    none(ev.Installed, running.give(ev.Tick()))


def test_a_dead_link_is_left_out() -> None:
    driver = Driver("bcube:3x2")
    driver.install(1)
    assert only(ev.Links, driver.install(2, failures=("server:1", "link:0/1"))).wanted == {(2, 0)}


def test_the_views_are_kept_with_their_times(running: Driver) -> None:
    running.submit()
    running.now = 5.0
    running.accept(2)
    running.now = 5.5
    running.told(msg.Install(1, 2))
    record = running.core.views[-1]
    assert (record.frozen_at_s, record.installed_at_s, record.recover_s) == (5.0, 5.5, None)
    running.submit()
    running.now = 6.0
    running.complete()
    running.token()
    assert running.core.views[-1].recover_s == 1.0


# --- coordinators ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        msg.Who(1),
        msg.Freeze(1, 9, "old"),
        msg.Install(1, 2),
        msg.Evict(1, 9, "old"),
        msg.Abort(1, "too-few", "old"),
        msg.Shutdown(1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_old_coordinator_is_told_so_and_changes_nothing(running: Driver, message: msg.ToServer) -> None:
    running.told(msg.Who(2))
    assert running.told(message) == [ev.Tell(msg.Deposed(0, 2))]
    running.submit()
    running.complete()
    only(ev.Commit, running.token())


def test_an_old_proposal_is_not_accepted(running: Driver) -> None:
    running.told(msg.Freeze(1, 2, "old"))
    running.told(msg.Who(2))
    assert running.told(msg.Propose(1, running.view(2))) == [ev.Tell(msg.Deposed(0, 2))]


def test_a_new_coordinator_hears_everything_it_needs(running: Driver) -> None:
    running.submit()
    running.complete()
    running.give(ev.PeerLost(PEER, 0, "reset", "reset"))
    running.give(ev.Ended("done"))
    suspect, status = (one.message for one in running.told(msg.Who(2)))
    assert (status.term, status.epoch, status.committed, status.complete) == (2, 0, 0, 1)
    assert (status.outcome, status.promised, status.installed) == ("done", 1, running.view(1))
    assert (suspect.observer, suspect.peer, suspect.level, suspect.kind) == (0, 1, 0, "reset")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (msg.Evict(1, 2, "cut off"), Evicted),
        (msg.Abort(1, "training", "server 3 raised", 3), TrainingError),
        (msg.Abort(1, "too-few", "only 1"), TooFewServers),
    ],
)
def test_the_end_of_the_job_reaches_the_user(running: Driver, message: msg.ToServer, error: type) -> None:
    running.submit()
    done = running.told(message)
    assert isinstance(only(ev.Stop, done).error, error)
    assert only(ev.Links, done).wanted == frozenset()
    assert isinstance(only(ev.Stop, running.submit()).error, error)
    assert running.core.waits_for().startswith("nothing: stopped (")
    assert running.told(message) == []


def test_an_evicted_server_installs_nothing_any_more(running: Driver) -> None:
    """It had accepted view 2 and was complete; proof of view 2 reaches it after its eviction from view 3.

    Its step is gone: this was an InvariantError in the middle of its loop.
    """
    running.submit()
    running.complete()
    running.accept(2, commit=1)
    running.told(msg.Evict(1, 3, "cut off"))
    assert running.core.admit(PEER, running.frame(Kind.REDUCE, 0, 5, epoch=2)) is ev.Verdict.WAIT
    assert not running.core.urgent
    none(ev.Installed, running.give(ev.Tick()))
    assert running.told(msg.Install(1, 2)) == []
    assert running.told(msg.Freeze(1, 4, "test")) == []


def test_leave(running: Driver) -> None:
    running.give(ev.Ended("done"))
    assert running.told(msg.Shutdown(1)) == [ev.Exit()]


def test_the_end_of_a_job_that_went_on_without_this_server_reaches_its_user(running: Driver) -> None:
    """It was evicted unawares; if it only left, its user's call would never return."""
    running.submit()
    done = running.told(msg.Shutdown(1))
    assert isinstance(only(ev.Stop, done).error, Evicted)
    none(ev.Exit, done)


# --- suspicion -------------------------------------------------------------------------------------


def test_silence_is_borne_for_longer_during_the_first_steps(running: Driver) -> None:
    """A training function that imports its libraries may keep the interpreter's lock."""
    running.now = 0.01
    running.submit()
    for tick in range(1, 199):
        running.now = tick * 0.05
        none(ev.Tell, running.give(ev.Tick()))
    running.now = 10.1
    assert only(ev.Tell, running.give(ev.Tick())).message.kind == "silence"


def test_heartbeats_go_out_and_silence_is_told(running: Driver) -> None:
    running.warm_up()
    running.now = 0.1
    assert only(ev.Heartbeat, running.give(ev.Tick())) == ev.Heartbeat(PEER, 0)
    told: list[msg.ToCoordinator] = []
    for tick in range(2, 20):
        running.now = tick * 0.05
        told += [one.message for one in running.give(ev.Tick()) if isinstance(one, ev.Tell)]
    assert [type(one) for one in told] == [msg.Suspect]
    assert told[0].kind == "silence"
    running.core.heard(PEER, 0, running.now)
    assert only(ev.Tell, running.give(ev.Tick())).message == msg.Withdraw(0, PEER, 0)


def test_silence_counts_from_the_beginning_of_a_view() -> None:
    """A neighbour that was out of the old view sent nothing in it.

    If its silence counted from then, it would be suspected before others that fell silent with it, and the
    coordinator, which hears the rest too late, would blame the wrong one.
    """
    driver = Driver()
    driver.install(1)
    driver.warm_up()
    driver.now = 0.4
    driver.give(ev.Tick())
    driver.install(2, commit=2)
    for tick in range(1, 10):
        driver.now = 0.4 + tick * 0.05
        none(ev.Tell, driver.give(ev.Tick()))
    driver.now = 0.95
    assert only(ev.Tell, driver.give(ev.Tick())).message.kind == "silence"


def test_a_lost_connection_is_told_at_once_unless_it_is_none_of_ours(running: Driver) -> None:
    assert only(ev.Tell, running.give(ev.PeerLost(PEER, 0, "eof", "closed"))).message.kind == "reset"
    assert running.give(ev.PeerLost(PEER, 1, "eof", "closed")) == []


def test_an_own_nic_is_told(running: Driver) -> None:
    suspect = only(ev.Tell, running.give(ev.OwnNicLost(0, "no carrier"))).message
    assert (suspect.observer, suspect.peer, suspect.kind) == (0, 0, "own-nic")


def test_a_new_view_forgets_suspicions(running: Driver) -> None:
    running.give(ev.PeerLost(PEER, 0, "eof", "closed"))
    running.install(2)
    assert [type(one.message) for one in running.told(msg.Who(2))] == [msg.Status]


def test_reduce_instructions_are_the_engines(running: Driver) -> None:
    running.submit()
    assert only(Reduce, running.receive(running.frame(Kind.REDUCE, 0, 5)))[:2] == (0, 5)


def test_a_dial_that_times_out_while_frozen_is_no_news(running: Driver) -> None:
    """Its peer may be frozen, too, or without the view: the next view opens the connection again."""
    running.told(msg.Freeze(running.term, 2, "test"))
    assert running.give(ev.PeerLost(PEER, 0, "timeout", "no answer")) == []
    suspect = only(ev.Tell, running.give(ev.PeerLost(PEER, 0, "reset", "broken")))
    assert suspect.message.kind == "reset"


def test_a_call_is_told_when_it_is_another_one_and_not_at_every_place(running: Driver) -> None:
    def told(step: int, text: str) -> list[str]:
        done = running.submit(step, text=text)
        running.complete()
        running.token()
        return [one.text.decode().partition("\n")[2] for one in done if isinstance(one, ev.SendText)]

    assert told(1, "sum f64 10 in iteration 0 of steps(9)") == ["sum f64 10 in iteration 0 of steps(9)"]
    assert told(2, "sum f64 10 in iteration 1 of steps(9)") == []
    assert told(3, "max f64 10 in iteration 2 of steps(9)") == ["max f64 10 in iteration 2 of steps(9)"]


def test_a_neighbour_at_another_place_is_named_with_its_call(running: Driver) -> None:
    running.submit(text="sum f64 10 in iteration 4 of steps(9)")
    described = running.frame(Kind.DESCRIBE, 0, 5, step=1, signature=4, nbytes=5)
    running.core.received(PEER, described, "sum <f8 10\nsum f64 10 in iteration 0 of steps(9)", 0.0)
    assert running.core.admit(PEER, running.frame(Kind.REDUCE, 0, 5, signature=5)) is ev.Verdict.DROP
    error = str(only(ev.Stop, running.give(ev.Tick())).error)
    assert f"server {PEER} called sum f64 10 elsewhere in its program" in error
    assert f"server {ME} called sum f64 10 in iteration 4 of steps(9)" in error
