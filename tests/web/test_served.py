"""The page over HTTP, of a job that is played by the test: who is answered, and what is shown at the end."""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from test_page_model import status

from bml.errors import FabricError
from bml.web.connections import MOST_CONNECTIONS
from bml.web.served import ServedPage

pytestmark = pytest.mark.real


class Played:
    """A job: `step` is where it is; an `error` is raised instead of its status."""

    def __init__(self) -> None:
        self.step = 15
        self.error: Exception | None = None
        self.held: threading.Event | None = None
        self.faults: list[str] = []

    def status(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        if self.held is not None:
            self.held.wait(10)
        return status(step=self.step)

    def inject(self, spec: str) -> dict[str, Any]:
        self.faults.append(spec)
        return {"done": spec}


class Asking:
    """Asks a page, as a browser that was given its address."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        assert parts.port is not None
        self.port, self.query = parts.port, parts.query

    def get(self, path: str, query: str | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", f"{path}?{self.query if query is None else query}", headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def shown(self) -> dict[str, Any]:
        """The page now."""
        code, body = self.get("/api/status")
        assert code == 200
        return dict(json.loads(body)["page"])

    def post(self, body: bytes, token: str | None = None) -> tuple[int, bytes]:
        right = self.query.partition("=")[2]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            headers = {"X-BML-Token": right if token is None else token}
            connection.request("POST", "/api/inject", body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def stream(self, held: ExitStack) -> socket.socket:
        """Open a stream of events, and read its first bytes."""
        sock = held.enter_context(socket.create_connection(("127.0.0.1", self.port), 10))
        host = f"Host: 127.0.0.1:{self.port}"
        sock.sendall(f"GET /api/events?{self.query} HTTP/1.1\r\n{host}\r\n\r\n".encode())
        assert b"200" in sock.recv(64)
        return sock


@contextmanager
def served(injects: bool = False) -> Iterator[tuple[ServedPage, Played, Asking]]:
    with ServedPage(0, injects) as page:
        job = Played()
        page.follow(job)
        yield page, job, Asking(page.url)


def test_without_the_token_or_from_another_page_nothing_is_answered() -> None:
    with served() as (_, _, asking):
        assert asking.get("/")[0] == 200
        for path in ("/", "/api/status", "/api/events", "/page.js"):
            assert asking.get(path, query="")[0] == 403
            assert asking.get(path, Origin="http://evil.example")[0] == 403
            assert asking.get(path, Host="evil.example")[0] == 403
        assert asking.post(b"{}", token="caf\xe9")[0] == 403
        assert asking.get("/access.py")[0] == 404


def test_faults_are_injected_only_where_that_was_asked_for() -> None:
    with served() as (_, job, asking):
        assert asking.post(b'{"fault": "kill:4"}')[0] == 403
        assert job.faults == []
    with served(injects=True) as (_, job, asking):
        assert asking.post(b'{"fault": "kill:4"}') == (200, b'{"done": "kill:4"}')
        assert asking.post(b"[]")[0] == asking.post(b"{")[0] == 400
        assert job.faults == ["kill:4"]


def test_strangers_who_hold_connections_take_neither_descriptors_nor_the_page() -> None:
    with served() as (_, _, asking), ExitStack() as held:
        stream = asking.stream(held)
        before = len(os.listdir("/proc/self/fd"))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        strangers = [
            held.enter_context(socket.create_connection(("127.0.0.1", asking.port), 10))
            for _ in range(min(3 * MOST_CONNECTIONS, limit // 3))
        ]
        assert len(strangers) > MOST_CONNECTIONS
        for each in strangers:
            each.send(b"GET / HT")
            assert asking.get("/")[0] == 200, "the newest is answered"
        opened = len(os.listdir("/proc/self/fd")) - before - len(strangers)
        assert opened <= MOST_CONNECTIONS + 2
        assert b"event: page" in _read_until(stream, b"event: page"), "a stream is kept"


def _read_until(sock: socket.socket, what: bytes) -> bytes:
    found = b""
    while what not in found and (more := sock.recv(4096)):
        found += more
    return found


def test_the_last_page_has_what_came_just_before_the_end() -> None:
    with served() as (page, job, asking):
        assert asking.shown()["step"] == 15
        job.step = 19
        page.end({"ended_well": False, "text": "no server reached the end", "steps": 9})
        last = asking.shown()
        assert (last["ended"], last["mood"], last["step"]) == (True, "failed", 19)
        page.fail(KeyboardInterrupt())
        assert asking.shown() == last


def test_an_answer_that_comes_after_the_end_is_not_shown() -> None:
    """Another thread may have asked before, and make its page when the last one is there."""
    with served() as (page, _, asking):
        before = asking.shown()
        page.end({"ended_well": True, "text": "4 servers reached the end", "steps": 9})
        page._show(before)
        assert asking.shown()["ended"]
        assert page._page["ended"]


def test_the_page_of_a_job_that_starts_is_sent_again_and_again() -> None:
    """The browser takes for old what does not come again, however long the start takes."""
    with ServedPage(0, injects=False) as page:
        asking = Asking(page.url)
        page.say("starting Ray")
        before = asking.shown()
        assert before["now_s"] > 0
        deadline = time.monotonic() + 40
        while (now := asking.shown())["now_s"] == before["now_s"]:
            assert time.monotonic() < deadline
        assert now == {**before, "now_s": now["now_s"], "headline": "starting Ray"}


@pytest.mark.parametrize("error", [FabricError("busy"), KeyError("fabric")])
def test_an_end_without_a_status_is_shown_all_the_same(error: Exception) -> None:
    with served() as (page, job, asking):
        asking.shown()
        job.error = error
        page.end({"ended_well": True, "text": "4 servers reached the end", "steps": 9})
        assert asking.shown()["headline"] == "The job has ended well: 4 servers reached the end."


def test_a_page_that_is_left_says_that_the_job_goes_on() -> None:
    with served() as (page, _, asking):
        asking.shown()
        page.leave("Nobody looks any more, and the job goes on.")
        page.fail(KeyboardInterrupt())
        last = asking.shown()
        assert (last["ended"], last["mood"]) == (True, "fine")
        assert last["headline"] == "Nobody looks any more, and the job goes on."


def test_streams_that_were_closed_are_forgotten() -> None:
    with served() as (page, _, asking):
        for _ in range(5):
            with ExitStack() as held:
                asking.stream(held)
        site = page._site
        assert site is not None
        deadline = time.monotonic() + 40
        while site.streams:  # each notices when the next page is written
            assert time.monotonic() < deadline
            page.say("")
            page._ask(anyway=True)
            time.sleep(0.01)


def test_a_page_is_left_at_once_although_the_launcher_is_stopped() -> None:
    with served() as (page, job, asking):
        asking.shown()
        held = threading.Event()
        job.held = held
        asked = threading.Thread(target=page._ask, args=(True,))
        asked.start()
        try:
            page.leave("The job goes on.")
            assert asking.get("/")[0] == 200
        finally:
            held.set()
            asked.join()
        assert page._page["headline"] == "The job goes on."


def test_nothing_is_left_of_a_closed_page() -> None:
    with served() as (_, _, asking), ExitStack() as held:
        asking.stream(held)
    assert not [each for each in threading.enumerate() if each.name == "bml-page"]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", asking.port), 1)
