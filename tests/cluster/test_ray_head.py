"""Ray's head is away: when the job must end for it, and how it is looked for."""

from __future__ import annotations

import errno
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from fake_ray import SPEC, report

import bml
from bml.cluster.launcher.result import Result
from bml.cluster.ray.watching import head
from bml.cluster.ray.watching.absence import LOOK_S, PATIENCE_S, RAYS_S, SETTING, Absence, rays_patience_s
from bml.train.keeping.settings import Keeping


def miss(absence: Absence, at_s: float, takes_s: float = 0.0) -> float:
    """It does not answer a look that begins then; returns when the next one begins."""
    absence.missed("refused", at_s, at_s + takes_s)
    return at_s + takes_s + LOOK_S


def test_a_head_that_is_away_for_long_is_gone() -> None:
    absence, now = Absence(60.0), 100.0
    while not absence.gone:
        now = miss(absence, now)
    assert now - 100.0 == pytest.approx(24.0 + LOOK_S)
    assert absence.away_s == pytest.approx(24.0)
    assert absence.limit_s + absence.leaves_s < 60.0 - 6.0, "time to close the connection is left"
    assert absence.why == "refused"


def test_a_head_that_comes_back_in_time_is_here() -> None:
    absence, now = Absence(60.0), 0.0
    for _ in range(100):
        for _ in range(23):
            now = miss(absence, now)
        assert not absence.gone
        absence.answered()
        now += LOOK_S
    assert absence.away_s == 0.0


def test_a_head_that_is_gone_stays_gone() -> None:
    absence, now = Absence(2.0), 0.0
    for _ in range(3):
        now = miss(absence, now)
    absence.answered()
    assert absence.gone
    assert absence.away_s >= 0.8


def test_silence_counts_while_an_answer_is_awaited() -> None:
    absence = Absence(60.0)
    absence.missed("silent", 0.0, PATIENCE_S)
    absence.missed("silent", PATIENCE_S + LOOK_S, 2 * PATIENCE_S + LOOK_S)
    assert absence.away_s == 2 * PATIENCE_S + LOOK_S


def test_time_in_which_nobody_looked_does_not_count() -> None:
    absence, now = Absence(60.0), 0.0
    for _ in range(10):
        now = miss(absence, now)
    before_s = absence.away_s
    now = miss(absence, now + 1000.0)  # this process was stopped
    assert absence.away_s == before_s
    assert not absence.gone
    miss(absence, now)
    assert absence.away_s == before_s + LOOK_S


def test_a_look_in_which_this_process_was_stopped_counts_for_as_long_as_looks_may_take() -> None:
    absence = Absence(60.0)
    miss(absence, 0.0, takes_s=1000.0)
    assert not absence.gone
    assert absence.away_s == 2 * PATIENCE_S + 2.0


def test_it_is_never_gone_before_its_limit_whatever_is_seen() -> None:
    chance = random.Random(1)
    for _ in range(300):
        absence, now, last_here = Absence(chance.choice((2.0, 20.0, 60.0))), 0.0, 0.0
        while not absence.gone and now < 1000.0:
            takes_s = chance.choice((0.0, 0.01, PATIENCE_S))
            if chance.random() < 0.1:
                absence.answered()
                last_here = now + takes_s
            else:
                absence.missed("", now, now + takes_s)
            now += takes_s + LOOK_S + chance.choice((0.0, 0.0, 3.0, 100.0))
        if absence.gone:
            assert now - last_here >= absence.limit_s


@pytest.mark.parametrize(("text", "seconds"), [("20", 20.0), ("x", RAYS_S), ("0", 1.0), ("600", 600.0)])
def test_rays_patience(text: str, seconds: float) -> None:
    assert rays_patience_s({SETTING: text}) == seconds
    assert rays_patience_s({}) == RAYS_S


NONE_LEFT = OSError(errno.EMFILE, "Too many open files")
NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def raising(monkeypatch: pytest.MonkeyPatch, of: object, name: str, error: OSError) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(of, name, fail)


def test_a_process_without_descriptors_says_nothing_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, head.socket, "create_connection", NONE_LEFT)
    assert head.obstacle("127.0.0.1:1") is None
    raising(monkeypatch, head.socket, "create_connection", NO_NAME)
    raising(monkeypatch, head.os, "open", NONE_LEFT)
    assert head.obstacle("raycluster-head-svc:6379") is None


def test_a_head_whose_name_has_no_address_any_more_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A headless service of Kubernetes, as KubeRay makes it, loses its name with its pod."""
    raising(monkeypatch, head.socket, "create_connection", NO_NAME)
    why = head.obstacle("raycluster-head-svc:6379")
    assert why == "raycluster-head-svc has no address: Name or service not known"


def test_looks_that_could_not_be_made_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "1")
    monkeypatch.setattr(head, "LOOK_S", 0.02)
    seen, came = iter(["refused", None, "refused", None] * 100), threading.Event()
    monkeypatch.setattr(head, "obstacle", lambda address: next(seen))
    head.HeadWatch("127.0.0.1:1", lambda why: came.set())
    assert came.wait(20)


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Listen; answer every hello so, or hang up on it; None: never accept."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            while answer is not None:
                try:
                    sock = server.accept()[0]
                except OSError:
                    return
                with sock:
                    sock.recv(100)
                    sock.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_an_answer_is_a_sign_of_life() -> None:
    with listening(b"\0") as address:
        assert head.obstacle(address) == ""


def test_a_dead_stopped_or_foreign_head_does_not_answer() -> None:
    with listening(None) as address:
        assert head.obstacle(address, 0.1) == "it is silent for 0.1 s"
    assert "refused" in head.obstacle(address)
    with listening(b"") as address:
        assert head.obstacle(address) == "it hangs up"
    assert head.obstacle("no address")


def test_a_watch_says_once_that_the_head_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "1")
    monkeypatch.setattr(head, "LOOK_S", 0.05)
    said, came = list[str](), threading.Event()

    def gone(why: str) -> None:
        said.append(why)
        came.set()

    with listening(None) as address:
        pass
    head.HeadWatch(address, gone)
    assert came.wait(20)
    assert len(said) == 1
    assert said[0].startswith(f"Ray's head at {address} has been gone for ")
    assert "refused" in said[0]


def test_servers_that_leave_before_the_launcher_knows_tell_it_why() -> None:
    watch = head.HeadWatch("127.0.0.1:1", lambda why: None)
    watch.close()
    watch.heard(f"it leaves: {watch.why}")
    assert not watch.is_news(), "the head is here"
    watch.absence.missed("refused", 0.0, 1.0)
    for other in ("", "server 1 was evicted: its NICs were silent", "it leaves: its process got SIGTERM"):
        watch.heard(other)
        assert not watch.is_news(), "that needs no head"
    watch.heard(f"server 1 is out of view 2: it leaves: {watch.why}")
    assert watch.is_news()
    assert not watch.is_news()


def test_a_server_that_lost_the_head_alone_was_cut_off() -> None:
    watch = head.HeadWatch("127.0.0.1:1", lambda why: None)
    watch.close()
    error = f"it leaves: {watch.why}"
    assert head.was_cut_off(watch, error)
    assert head.was_cut_off(None, error), "the launcher is on the head's machine"
    assert not head.was_cut_off(watch, "it leaves: its process got SIGTERM")
    watch.absence.missed("refused", 0.0, 1.0)
    assert not head.was_cut_off(watch, error), "it is gone for all"


@pytest.mark.parametrize(
    ("folder", "says"), [("kept", "go on with `bml run … --resume kept`"), ("", "nothing is left to go on")]
)
def test_the_error_says_how_to_go_on(folder: str, says: str) -> None:
    spec = replace(SPEC, keeping=Keeping(folder))
    stopped = replace(report(1), outcome="stopped", kind="TooFewServers", error="only 1 of 2")
    result = Result(spec, reports={1: stopped}, headless="Ray's head is gone")
    failure = result.failure()
    assert isinstance(failure, bml.FabricError)
    assert str(failure).startswith("Ray's head is gone; ")
    assert says in str(failure)
    raised = replace(report(0), outcome="failed", kind="ValueError", error="no")
    assert isinstance(replace(result, reports={0: raised}).failure(), bml.TrainingError)
    assert Result(spec, reports={0: report(0)}, headless="Ray's head is gone").failure() is None
