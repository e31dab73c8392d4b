"""Messages between the launcher and its processes, and what users are told: nobody waits for slow readers."""

from __future__ import annotations

import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from bml.cluster.launcher.callbacks import Teller
from bml.cluster.launcher.join_starter import JoinStarter
from bml.cluster.process import worker
from bml.cluster.process.logs import LogsAside
from bml.cluster.process.mail import Inbox, Outbox, receive
from bml.errors import StartError

WITHIN_S = 30.0
BULK = b"x" * (1 << 20)  # no socket has room for it

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.001)
    return found


def test_messages_arrive_in_order(pair: Pair) -> None:
    outbox, inbox = Outbox(pair[0], 10), Inbox(pair[1])
    for number in range(5):
        outbox.put("number", number)
    assert inbox.take() == [("number", number) for number in range(5)]
    assert inbox.take() == []
    outbox.put(BULK)
    assert receive(pair[1]) == (BULK,)


def test_who_sends_never_waits_and_a_slow_reader_gets_the_newest(pair: Pair) -> None:
    outbox = Outbox(pair[0], 1)
    outbox.put(BULK)
    begun = time.monotonic()  # if it waited, it would do so for ever
    for number in range(1000):
        outbox.put("changed", "this group", number)
        outbox.put("changed", "other group", number)
        outbox.put("heartbeat")
    assert time.monotonic() - begun < WITHIN_S
    newest = [("changed", "this group", 999), ("changed", "other group", 999), ("heartbeat",)]
    assert [receive(pair[1]) for _ in range(4)] == [(BULK,), *newest]
    outbox.flush()
    outbox.put("it goes on")
    assert receive(pair[1]) == ("it goes on",)


def test_flush_waits_for_what_is_on_its_way_unless_the_reader_goes(pair: Pair) -> None:
    outbox = Outbox(pair[0], 10)
    outbox.put(BULK)
    flushed = threading.Thread(target=outbox.flush)
    flushed.start()
    flushed.join(0.05)
    assert flushed.is_alive()
    pair[1].close()
    flushed.join(WITHIN_S)
    assert not flushed.is_alive()
    outbox.put("nobody reads it")


def test_to_close_ends_what_is_on_its_way(pair: Pair) -> None:
    outbox = Outbox(pair[0], 10)
    outbox.put(BULK)
    outbox.close()
    outbox.flush()


def test_who_reads_never_waits_for_the_rest_of_a_message(pair: Pair) -> None:
    inbox, pickled = Inbox(pair[1]), pickle.dumps(("whole",))
    data = len(pickled).to_bytes(8, "big") + pickled
    for byte in data[:-1]:
        pair[0].sendall(bytes([byte]))
        assert inbox.take() == []
    pair[0].sendall(data[-1:] + data)
    assert inbox.take() == [("whole",), ("whole",)]
    assert not inbox.over
    pair[0].close()
    assert inbox.take() == []
    assert inbox.over
    with pytest.raises(EOFError):
        receive(pair[1])


# --- what the user is told ---------------------------------------------------------------------------


def snapshot(epoch: int, step: int) -> dict[str, Any]:
    return {"term": 1, "epoch": epoch, "step": step}


def test_a_slow_function_misses_steps_and_no_view() -> None:
    told, go, begun = [], threading.Event(), threading.Event()

    def slow(now: dict[str, Any]) -> None:
        told.append((now["epoch"], now["step"]))
        begun.set()
        assert go.wait(WITHIN_S)

    teller = Teller(slow)
    teller.tell(snapshot(1, 0))
    assert begun.wait(WITHIN_S)
    for step in range(1, 10):
        teller.tell(snapshot(1 + step // 4, step))
    go.set()
    teller.drain(WITHIN_S)
    assert told == [(1, 0), (1, 3), (2, 7), (3, 9)]
    teller.close(WITHIN_S)
    teller.tell(snapshot(4, 10))
    assert len(told) == 4


def test_what_is_said_comes_in_order_with_the_snapshots() -> None:
    told: list[Any] = []
    teller = Teller(lambda now: told.append(now["epoch"]))
    teller.say(told.append, "one")
    teller.tell(snapshot(1, 1))
    teller.say(told.append, "two")
    teller.drain(WITHIN_S)
    assert told == ["one", 1, "two"]
    teller.close(WITHIN_S)


def test_an_error_of_the_users_is_kept_and_nothing_is_told_after_it() -> None:
    told = []

    def fails(now: dict[str, Any]) -> None:
        told.append(now)
        raise ValueError("of the user's")

    teller = Teller(fails)
    teller.tell(snapshot(1, 1))
    until(lambda: teller.error)
    teller.tell(snapshot(2, 2))
    teller.drain(WITHIN_S)
    assert len(told) == 1
    assert str(teller.error) == "of the user's"


def test_a_function_that_never_returns_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    for_ever = threading.Event()
    teller = Teller(lambda now: for_ever.wait(WITHIN_S) and None)
    teller.tell(snapshot(1, 1))
    teller.drain(0.05)
    assert "has not returned" in caplog.text
    teller.close(0.05)
    for_ever.set()


def test_a_function_may_end_what_it_hears_of() -> None:
    ended = threading.Event()

    def ends(now: dict[str, Any]) -> None:
        teller.drain(WITHIN_S)
        teller.close(WITHIN_S)
        ended.set()

    teller = Teller(ends)
    teller.tell(snapshot(1, 1))
    assert ended.wait(1.0)


# --- what is logged ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_logger")
def test_who_logs_does_not_wait_for_a_terminal_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    written, stopped = [], threading.Event()

    class Terminal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert stopped.wait(WITHIN_S)
            written.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger(), "handlers", [Terminal()])
    logs = LogsAside()
    logs.start()
    begun = time.monotonic()
    for number in range(3000):
        logging.getLogger("bml.cluster").warning("news %d", number)
    assert time.monotonic() - begun < WITHIN_S
    logs.drain(0.01)
    assert written == []
    stopped.set()
    logs.drain(WITHIN_S)
    assert written[:1000] == [f"news {number}" for number in range(1000)]
    assert len(written) <= 1001


@pytest.mark.usefixtures("own_logger")
def test_a_handler_that_raises_ends_no_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []

    class Fails(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            written.append(record.getMessage())
            raise ValueError("of the user's handler")

    monkeypatch.setattr(logging.getLogger(), "handlers", [Fails()])
    logs = LogsAside()
    logs.start()
    for number in range(3):
        logging.getLogger("bml.cluster").warning("news %d", number)
    logs.drain(WITHIN_S)
    assert written == ["news 0", "news 1", "news 2"]
    assert "of the user's handler" in capsys.readouterr().err


# --- servers that are started beside -----------------------------------------------------------------


def test_a_server_that_finds_no_room_holds_up_no_other() -> None:
    started, room = [], threading.Event()

    def join(server: int, incarnation: int, give_up: threading.Event) -> None:
        if server == 1:
            assert room.wait(WITHIN_S)
            raise StartError("it has no machine")
        started.append((server, incarnation))

    joining = JoinStarter(join)
    for server in (1, 2, 3):
        joining.begin(server, server)
    failed: list[tuple[int, str]] = []
    until(lambda: failed.extend(joining.failed()) or joining.coming == {1})
    assert sorted(started) == [(2, 2), (3, 3)]
    assert failed == []
    room.set()
    until(lambda: failed.extend(joining.failed()) or not joining.coming)
    assert failed == [(1, "it has no machine")]
    joining.close()


def test_what_the_system_refuses_to_one_server_is_no_end_of_the_job() -> None:
    def join(server: int, incarnation: int, give_up: threading.Event) -> None:
        raise OSError(24, "Too many open files")

    joining = JoinStarter(join)
    joining.begin(1, 1)
    failed: list[tuple[int, str]] = []
    until(lambda: failed.extend(joining.failed()) or not joining.coming)
    assert failed == [(1, "[Errno 24] Too many open files")]
    joining.close()


def test_a_start_is_given_up_at_the_end() -> None:
    def join(server: int, incarnation: int, give_up: threading.Event) -> None:
        assert give_up.wait(WITHIN_S)
        raise StartError("given up")

    joining = JoinStarter(join)
    joining.begin(1, 1)
    joining.begin(2, 2)
    joining.close()
    assert sorted(joining.failed()) == [(1, "given up"), (2, "given up")]


def test_a_bug_of_a_start_is_raised() -> None:
    def join(server: int, incarnation: int, give_up: threading.Event) -> None:
        raise ZeroDivisionError

    joining = JoinStarter(join)
    joining.begin(1, 1)
    with pytest.raises(ZeroDivisionError):
        until(joining.failed)
    joining.close()


def test_a_process_whose_launcher_is_gone_ends_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = socket.socketpair()
    mine.close()
    worker.serve(other.detach())
    assert capsys.readouterr() == ("", "")


def test_a_process_whose_job_ends_before_it_has_a_place_ends_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launcher, process = socket.socketpair()
    with launcher:
        with closing(Outbox(launcher, 1)) as outbox:
            outbox.put("end")
            outbox.flush()
        worker.serve(process.detach())
        assert launcher.recv(1) == b"", "it has hung up"
    assert capsys.readouterr() == ("", "")
