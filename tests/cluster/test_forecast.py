"""What a server says of the future, from notes that a test makes: no thread, no socket, no clock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bml.cluster.launcher import suspects as launchers
from bml.cluster.launcher.running import Job
from bml.cluster.launcher.suspects import let_suspects_go, look
from bml.cluster.server.forecast import Forecast
from bml.cluster.server.nics import NicSample
from bml.cluster.server.status import answer
from bml.cluster.spec.job import JobSpec
from bml.predict.pace import Pace
from bml.predict.suspects import Suspects
from bml.predict.trouble import LOOKED_AT, HostSample, PeerSample
from bml.protocol.server import events as ev
from bml.topology import parse


class World:
    """A server of a job, as its forecast sees it: views come, steps are done, seconds pass."""

    def __init__(self, fabric: str = "bcube:2x2", server: int = 0, throughput: bool = True):
        self.now = 0.0
        self.pace = Pace(lambda: self.now)
        self.fabric = parse(fabric)
        self.dispatched: list[ev.Event] = []
        self.core = SimpleNamespace(server=server, views=[], epoch=0, view=None)
        self.samples: deque[NicSample] = deque(maxlen=1)
        self.host = HostSample()
        self.shell: Any = SimpleNamespace(
            core=self.core,
            throughput=SimpleNamespace(pace=self.pace) if throughput else None,
            slice_nbytes=lambda nbytes: 1 << 16,
            nics=SimpleNamespace(samples=self.samples),
            handover=SimpleNamespace(leaves="", ask_to_leave=self._leave),
            dispatch=self.dispatched.append,
            poller=SimpleNamespace(guard=threading.Lock()),
        )
        self.shell.forecast = self.forecast = Forecast(self.shell, JobSpec(fabric), False)
        self.forecast._host = SimpleNamespace(sample=lambda now: self.host)  # type: ignore[assignment]
        self.install()

    @property
    def taken_out(self) -> list[int]:
        """The levels of this server's NICs that were taken out."""
        return [event.level for event in self.dispatched if isinstance(event, ev.OwnNicLost)]

    def _leave(self, why: str) -> None:
        self.shell.handover.leaves = why

    def install(self, *failures: str, servers: int | None = None) -> None:
        """A view is in force."""
        members = tuple(range(self.fabric.n_servers if servers is None else servers))
        view = SimpleNamespace(
            epoch=self.core.epoch + 1, contributors=members, members=members, failures=failures, halvings={}
        )
        self.core.views.append(SimpleNamespace(view=view, installed_at_s=self.now, recover_s=None))
        self.core.epoch, self.core.view = view.epoch, view

    def second(self, **peers: PeerSample) -> None:
        """A second passes, with these connections: n3_0 is that to server 3 over level 0."""
        self.now += 1.0
        named = {tuple(map(int, name[1:].split("_"))): each for name, each in peers.items()}
        self.samples.append(NicSample(self.now, named, {}))  # type: ignore[arg-type]
        self.forecast.look(self.now)
        self.forecast._watch(self.now)

    def step(
        self, done: float, took_s: float, wires_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """A boundary is passed, and then a step is done that takes so long, a part of it on the wires."""
        self.pace.passed(done)
        self.now += took_s - wires_s
        self.pace.begin()
        meanwhile()
        self.now += wires_s
        view = self.core.view
        self.core.views[-1].recover_s = 0.1
        self.pace.end(view.epoch, len(view.contributors), 40_000_000, True)
        self.forecast.look(self.now)

    def asked(self, kind: str, argument: str = "") -> dict[str, Any]:
        """What the server answers."""
        said: list[dict[str, Any]] = []
        answer(self.shell, (kind, argument), said.append)
        return said[0]


LOST, WELL = PeerSample(2000, 100, 0.1), PeerSample(2000, 0, 0.1)


def lossy(world: World) -> None:
    """A server whose NIC 0 loses segments on its way to all, after a time without."""
    for second in range(10):
        lost = LOST if second >= 4 else WELL
        if world.fabric.levels == 1:
            world.second(n1_0=lost, n2_0=lost, n3_0=lost)
        else:
            world.second(n1_0=lost, n2_1=WELL)


def test_a_server_acts_on_no_warning_by_itself() -> None:
    world = World()
    lossy(world)
    assert [each["kind"] for each in world.forecast.warnings(world.now)] == ["resent"]
    assert world.dispatched == [ev.LossyNics(((0, 0),))]
    (suspect,) = world.asked("suspects")["suspects"]
    assert (suspect["part"], suspect["last"]) == ("NIC 0/0", False)


def test_a_server_takes_out_its_own_part_when_it_is_asked_to() -> None:
    world = World()
    lossy(world)
    assert world.asked("take-out", "NIC 1/0") == world.asked("take-out", "server 0") == {"done": False}
    assert not world.taken_out
    assert world.asked("take-out", "NIC 0/0") == {"done": True}
    assert world.taken_out == [0]
    world.install("link:0/0")
    assert world.asked("suspects")["suspects"] == []
    assert world.asked("take-out", "NIC 0/0") == {"done": False}, "it is out"


def test_the_core_hears_once_where_segments_are_lost_and_that_they_are_no_more() -> None:
    world = World()
    lossy(world)
    for _ in range(LOOKED_AT + 1):
        world.second(n1_0=WELL, n2_1=WELL)
    assert world.dispatched == [ev.LossyNics(((0, 0),)), ev.LossyNics(())]


@pytest.mark.parametrize(
    ("fabric", "failures"),
    [
        ("switch:4", ()),
        ("bcube:2x2", ("link:0/1",)),
        ("bcube:2x2", ("switch:1/0",)),
        ("bcube:2x2", ("server:2",)),
    ],
)
def test_a_server_keeps_its_last_nic(fabric: str, failures: tuple[str, ...]) -> None:
    world = World(fabric)
    lossy(world)
    world.install(*failures)
    (suspect,) = world.asked("suspects")["suspects"]
    assert (suspect["part"], suspect["last"]) == ("NIC 0/0", True)
    assert world.asked("take-out", "NIC 0/0") == {"done": False}
    assert not world.taken_out


def test_a_server_of_a_machine_in_trouble_leaves_once() -> None:
    world = World()
    for second in range(10):
        world.host = HostSample(corrected_errors=second)
        world.second(n1_0=WELL, n2_1=WELL)
    assert not world.shell.handover.leaves
    assert [each["kind"] for each in world.asked("suspects")["suspects"]] == ["errors"]
    assert world.asked("take-out", "server 0") == {"done": True}
    assert "early warning: its memory corrected" in world.shell.handover.leaves
    assert world.asked("suspects")["leaves"]
    assert world.asked("take-out", "server 0") == {"done": False}


def test_of_servers_that_all_see_loss_none_goes() -> None:
    worlds = [World("switch:4", server) for server in range(4)]
    for second in range(20):
        for world in worlds:
            lost = LOST if second >= 4 else WELL
            peers = {f"n{peer}_0": lost for peer in range(4) if peer != world.core.server}
            world.second(**peers)
    asked: list[tuple[str, str]] = []

    def ask(request: tuple[str, str], patience: Any) -> dict[int, dict[str, Any]]:
        asked.append(request)
        return {world.core.server: world.asked(*request) for world in worlds}

    assert all(world.forecast.warnings(world.now) for world in worlds)
    assert look(Suspects(None), ask, 100.0) == ""
    assert asked == [("suspects", "")]
    assert not any(world.taken_out for world in worlds)


def test_one_server_at_a_time_goes() -> None:
    worlds = [World("bcube:3x2", server) for server in range(9)]
    for second in range(20):
        for world in worlds:
            if world.core.server in (2, 7):
                world.host = HostSample(corrected_errors=second)
            world.second(n1_0=WELL, n2_1=WELL)
    suspects, now = Suspects(None), 100.0

    def ask(request: tuple[str, str], patience: Any) -> dict[int, dict[str, Any]]:
        answers = {world.core.server: world.asked(*request) for world in worlds}
        for server, each in answers.items():
            if "machine" in each:
                each["machine"] = str(server)
        return answers

    assert look(suspects, ask, now) == "server 2"
    assert look(suspects, ask, now + 1) == ""
    assert [world.core.server for world in worlds if world.shell.handover.leaves] == [2]
    worlds.pop(2)
    assert look(suspects, ask, now + 60) == "server 7"


def test_the_launcher_looks_until_the_job_is_over_if_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_LOOK_S", 0.0)
    over, asked = threading.Event(), threading.Semaphore(0)

    def ask(request: tuple[str, str], patience: Any) -> dict[int, dict[str, Any]]:
        asked.release()
        raise OSError("a job goes on without")

    let_suspects_go(JobSpec("bcube:2x2"), ask, over)
    assert not [each for each in threading.enumerate() if each.name == "bml-suspects"]
    let_suspects_go(JobSpec("bcube:2x2", preempt_suspects=True), ask, over)
    (thread,) = [each for each in threading.enumerate() if each.name == "bml-suspects"]
    assert asked.acquire(timeout=10)
    assert asked.acquire(timeout=10)
    over.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_new_view_goes_as_its_steps_are_predicted() -> None:
    """Servers share the samples of a batch: three compute longer than four."""
    world, n_steps = World(), 400
    world.pace.shares_work = True

    def lose_a_server() -> None:
        world.install("server:3", servers=3)
        world.now += 1.0
        world.forecast.look(world.now)

    for step in range(60):
        world.step(step / n_steps, 0.8, 0.7)
    world.step(60 / n_steps, 0.8, 0.7, lose_a_server)
    predicted = world.forecast.predicted()
    assert predicted is not None
    step_s = predicted["step_s"]
    assert step_s > 1.02 * 0.8
    for step in (61, 62):  # boundaries of the new view; nothing is known of its rate
        world.step(step / n_steps, step_s, 0.7)
        rest = world.forecast.remaining(world.now)
        assert rest is not None
        assert rest["seconds"] == pytest.approx((n_steps - step - 1) * step_s, rel=0.01)


def test_nothing_is_modelled_before_a_view_has_committed_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server plans for the new view then, and steps wait for that plan."""
    world, planned = World(), list[int]()
    whole = world.forecast._model

    def model(view: Any) -> Any:
        planned.append(view.epoch)
        return whole(view)

    monkeypatch.setattr(world.forecast, "_model", model)
    world.second()
    assert planned == []
    world.step(0.0, 0.8, 0.7)
    assert planned == [1]

    def change() -> None:
        world.install("server:3", servers=3)
        world.second()
        assert planned == [1]

    world.step(0.1, 0.8, 0.7, change)
    assert planned == [1, 2]


def test_a_boundary_belongs_to_the_view_of_the_step_before_it() -> None:
    """The view changes just after a boundary at which nobody has looked yet: its cost is in the long step."""
    world, n_steps = World(), 100

    def change() -> None:
        world.install()
        world.forecast.look(world.now)
        world.now += 12.0

    for step in range(24):
        world.step(step / n_steps, 3.0, 0.7, change if step == 20 else lambda: None)
    remaining = world.forecast.remaining(world.now)
    assert remaining is not None
    assert remaining["seconds"] == pytest.approx((n_steps - 24) * 3.0, rel=0.02)
    assert world.forecast._remaining._losses == pytest.approx([12.0])


@pytest.mark.parametrize("kind", ["status", "metrics", "suspects", "take-out", "inject"])
def test_a_question_that_cannot_be_answered_ends_no_server(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """This shell lacks most of what is asked for; an exception would leave the loop, and end the server."""
    world = World()
    world.shell.forecast = None
    assert "Error" in world.asked(kind)["error"]
    assert "server 0 cannot answer" in caplog.text


def test_what_the_loop_reads_is_not_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    world, seen = World(), list[str]()
    locked = world.forecast._facts.locked
    parts = [(world.pace, "look"), (world.forecast._remaining, "note"), (world.forecast._remaining, "rest")]
    for part, name in parts:
        whole = getattr(part, name)

        def checked(*arguments: Any, name: str = name, whole: Callable[..., Any] = whole) -> Any:
            assert locked()
            seen.append(name)
            return whole(*arguments)

        monkeypatch.setattr(part, name, checked)
    for step in range(20):
        world.step(step / 100, 0.8, 0.7)
    assert world.forecast.remaining(world.now)
    assert {*seen} == {"look", "note", "rest"}


def test_in_the_status_of_a_job_a_server_that_cannot_answer_does_not() -> None:
    answers = {0: {"step": 7, "warnings": []}, 1: {"error": "KeyError: 1000"}}
    job: Any = SimpleNamespace(
        _fleet=SimpleNamespace(ask=lambda request, patience: answers, spares=SimpleNamespace(left=0)),
        _result=SimpleNamespace(dead={}, left={}, reports={}),
        _join_manager=SimpleNamespace(expected={0, 1}, to_come=[], never_there=[]),
        _history=SimpleNamespace(views=[], events=[]),
        _snapshot={},
        _launcher="processes",
        spec=JobSpec("bcube:2x1"),
        name="one",
        running=True,
    )
    assert Job.status(job)["servers"] == {0: answers[0], 1: {"answers": False}}


@pytest.mark.parametrize("throughput", [True, False], ids=["a session", "bml torchrun"])
def test_other_trees_in_another_view_are_no_falling_rate(throughput: bool) -> None:
    """Also where no session shows its steps, as nothing is predicted there."""
    world = World("bcube:3x2", throughput=throughput)
    for second in range(40):
        if second == 20:
            world.install()
        busy = PeerSample(10, 0, 0.1, 1_000_000, 1.0)
        less = busy._replace(nbytes=400_000) if second >= 20 else busy
        world.second(n1_0=less, n2_0=less, n3_1=busy, n6_1=busy)
    assert not world.forecast.warnings(world.now)
