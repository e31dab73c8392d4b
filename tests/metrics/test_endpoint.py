"""The endpoint in the launcher: its address, what it serves, and that it is gone afterwards."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import bml
from bml.cluster.fleets.fleet import NoSpares
from bml.cluster.launcher import metrics
from bml.cluster.launcher.join_manager import JoinManager
from bml.cluster.launcher.metrics import Endpoint, Facts, address_of, families
from bml.cluster.launcher.result import Result
from bml.cluster.spec.job import JobSpec
from bml.metrics.samples import Distribution, Sample
from bml.metrics.table import METRICS
from bml.topology.errors import FabricError, UsageError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (9400, ("127.0.0.1", 9400)),
        ("9400", ("127.0.0.1", 9400)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:0", ("::1", 0)),
        ("host.example:65535", ("host.example", 65535)),
    ],
)
def test_an_address(text: str | int, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "x", ":9400", "1.2.3.4:", "65536", "-1", "a:b", "٣", 1.5, True, "::1:" + "9" * 5000, "h\0st:1"],
)
def test_what_is_no_address(text: Any) -> None:
    with pytest.raises(UsageError, match="give a port"):
        address_of(text)


def read(url: str) -> dict[str, Any]:
    """What Prometheus' own parser makes of a scrape: (name, labels) -> value."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Servers:
    """A fleet of which only some servers answer; it counts how often it was asked."""

    spares = SimpleNamespace(left=2)

    def __init__(self, answers: dict[int, list[Sample]]):
        self.answers, self.asked = answers, 0

    def ask(self, request: tuple[str, str], patience: Any) -> dict[int, dict[str, Any]]:
        assert request == ("metrics", "")
        self.asked += 1
        return {server: {"samples": samples} for server, samples in self.answers.items()}


def result(*servers: int, dead: tuple[int, ...] = (), left: tuple[int, ...] = ()) -> Result:
    found = Result(JobSpec("bcube:3x2", job="one", absent=tuple({*range(9)} - {*servers})))
    found.dead, found.left = dict.fromkeys(dead, "why"), dict.fromkeys(left, "why")
    return found


def newcomers(result: Result) -> JoinManager:
    """Server 5 is being started."""
    found = JoinManager(lambda *_: None, NoSpares(), result, lambda _: False, lambda: False)
    found.incarnations[5] = 1
    found._join_starter.coming.add(5)
    return found


def test_it_serves_what_servers_say_and_closes() -> None:
    job = result(0, 1, 4, 6, dead=(4,), left=(6,))
    fleet: Any = Servers({0: [Sample("bml_steps_total", (), 7), Sample("bml_view_epoch", (), 2)]})
    endpoint = Endpoint(("127.0.0.1", 0))
    try:
        assert endpoint.url.startswith("http://127.0.0.1:")
        assert read(endpoint.url) == {}, "no job yet"
        endpoint.serve(fleet, job, newcomers(job))
        found = read(endpoint.url)
        for _ in range(20):
            assert read(endpoint.url) == found
        assert fleet.asked <= 2, "many scrapes cost a job no more than one"
    finally:
        endpoint.close()
        endpoint.close()
    name = ("job", "one")
    assert found == {
        ("bml_steps_total", name, ("server", "0")): 7,
        ("bml_view_epoch", name, ("server", "0")): 2,
        ("bml_server_answers", name, ("server", "0")): 1,
        ("bml_server_answers", name, ("server", "1")): 0,
        ("bml_servers_lost", name): 1,
        ("bml_spares", name): 2,
    }
    with pytest.raises(urllib.error.URLError):
        read(endpoint.url)


def test_a_server_that_cannot_say_its_counts_does_not_answer() -> None:
    job = result(0, 1)
    fleet: Any = Servers({0: [Sample("bml_steps_total", (), 7)]})
    ask = fleet.ask
    fleet.ask = lambda *question: {**ask(*question), 1: {"error": "KeyError: 1000"}}
    endpoint = Endpoint(("127.0.0.1", 0))
    try:
        endpoint.serve(fleet, job, newcomers(job))
        found = read(endpoint.url)
    finally:
        endpoint.close()
    assert found["bml_server_answers", ("job", "one"), ("server", "0")] == 1
    assert found["bml_server_answers", ("job", "one"), ("server", "1")] == 0


@pytest.mark.parametrize("ends", ["says nothing", "resets"])
def test_a_client_that_asks_nothing_is_nothing_to_hear_of(
    ends: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", 0.05)
    closed = threading.Semaphore(0)
    shut = metrics._Server.shutdown_request

    def closing(server: Any, request: Any) -> None:
        shut(server, request)
        closed.release()

    monkeypatch.setattr(metrics._Server, "shutdown_request", closing)
    endpoint = Endpoint(("127.0.0.1", 0))
    try:
        port = int(endpoint.url.rsplit(":", 1)[1].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as client:
            if ends == "resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            assert closed.acquire(timeout=10)
    finally:
        endpoint.close()
    assert capfd.readouterr().err == ""


def test_strangers_cannot_take_the_descriptors_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold connections, and send a byte now and then; these are cut in the end."""
    monkeypatch.setattr(metrics._Handler, "timeout", 60.0)  # as if another byte came in time
    endpoint = Endpoint(("127.0.0.1", 0))
    port = int(endpoint.url.rsplit(":", 1)[1].split("/")[0])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * metrics._MOST_CLIENTS)]
    try:
        refused = strangers[metrics._MOST_CLIENTS :]
        for each in refused:
            each.settimeout(30)
            assert each.recv(1) == b"", "it is closed at once"
        assert len(endpoint._server._open) == metrics._MOST_CLIENTS  # type: ignore[attr-defined]
        monkeypatch.setattr(metrics, "_LASTS_S", 0.0)
        for each in strangers[: metrics._MOST_CLIENTS]:
            each.settimeout(30)
            assert each.recv(1) == b"", "it is cut off"
        while endpoint._server._open:  # type: ignore[attr-defined]
            pass
        monkeypatch.undo()
        assert read(endpoint.url) == {}
    finally:
        for each in strangers:
            each.close()
        endpoint.close()


def test_of_a_silent_server_the_counters_stay() -> None:
    kept = {4: [Sample("bml_steps_total", (), 9), Sample("bml_queued_bytes", ("0",), 100)]}
    found = {
        (sample.name, sample.labels.get("server")): sample.value
        for family in families(Facts("one", {}, [4], 0, 0), kept)
        for sample in family.samples
    }
    assert found[("bml_steps_total", "4")] == 9
    assert found[("bml_server_answers", "4")] == 0
    assert ("bml_queued_bytes", "4") not in found


def test_a_histogram_has_all_buckets() -> None:
    metric = METRICS["bml_noticed_seconds"]
    value = Distribution(list(range(1, len(metric.bounds) + 2)), 3.5)
    kept = {0: [Sample(metric.name, (), value)]}
    samples = [
        sample
        for family in families(Facts("one", kept, [], 0, 0), kept)
        for sample in family.samples
        if sample.name.startswith(metric.name)
    ]
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    assert {float(le): value for le, value in buckets.items()} == dict(
        zip((*metric.bounds, float("inf")), value.cumulative, strict=True)
    )
    sums = {sample.name: sample.value for sample in samples if not sample.name.endswith("_bucket")}
    assert sums == {f"{metric.name}_sum": 3.5, f"{metric.name}_count": value.cumulative[-1]}


def test_a_taken_port_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(FabricError, match=rf"127\.0\.0\.1:{port}: Address already in use.*another port"):
            bml.start(print, launcher="processes", metrics=port)


def test_rays_endpoint_is_for_ray() -> None:
    with pytest.raises(UsageError, match="give a port"):
        bml.start(print, launcher="processes", metrics="ray")


def test_without_prometheus_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"bml\[metrics\]"):
        Endpoint(("127.0.0.1", 0))
