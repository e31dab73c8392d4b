"""The endpoint of a job's metrics for Prometheus, in the launcher: `bml run --metrics [HOST:]PORT`.

A scrape asks all servers for what they have counted, in a thread of its own, as `bml status` does: neither
the coordinator nor the thread that follows the job takes part in it.
"""

from __future__ import annotations

import importlib
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from bml.cluster.fleets.fleet import Fleet, Patience
from bml.cluster.launcher.join_manager import JoinManager
from bml.cluster.launcher.result import Result
from bml.errors import FabricError, UsageError
from bml.io.forks import close_on_fork
from bml.metrics.samples import Distribution, Sample
from bml.metrics.table import METRICS, TABLE, Metric

_LOG = logging.getLogger(__name__)

ON_RAY = "ray"
"""In place of an address: the actors bring their metrics to Ray's own endpoint."""
LOOPBACK = "127.0.0.1"
_PATIENCE = Patience(1.0)
#: Servers are not asked again sooner: many scrapes must not cost a job more than one.
_FRESH_S = 0.5
#: How long a client may take to send its request, in seconds.
_CLIENT_S = 5.0
#: How long a connection may last, and how many there may be: descriptors are left for the job.
_LASTS_S = 20.0
_MOST_CLIENTS = 16
_POLL_S = 0.02  # how often the server looks whether it is to end: `close` waits as long
_PORT = re.compile("[0-9]{1,5}")

Address = tuple[str, int]


def address_of(text: str | int) -> Address:
    """Return host and port of `9400`, `"9400"`, `"10.0.0.1:9400"` or `"[::1]:9400"`. Raises UsageError."""
    host, colon, port = str(text).rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else LOOPBACK
    if not host or "\0" in host or not _PORT.fullmatch(port) or int(port) >= 1 << 16:
        raise UsageError(f"metrics is {text!r:.80}: give a port, such as 9400, or HOST:PORT, or ray")
    return host, int(port)


class Facts(NamedTuple):
    """What a scrape finds: the samples of the servers that answered, and what the launcher knows."""

    job: str
    samples: Mapping[int, list[Sample]]
    silent: Iterable[int]
    n_lost: int
    n_spares: int


class NoEndpoint:
    """See Endpoint; the job has none."""

    url = ""

    def serve(self, fleet: Fleet, result: Result, join_manager: JoinManager) -> None:
        """See Endpoint."""

    def close(self) -> None:
        """See Endpoint."""


NO_ENDPOINT = NoEndpoint()


class Endpoint:
    """Serves the metrics of one job over HTTP, at `url`. Port 0 is any free one.

    Raises UsageError if prometheus_client is missing, FabricError if the address cannot be had.
    """

    def __init__(self, address: Address):
        self._app = _app_of(self)
        host, port = address
        try:
            self._server = make_server(host, port, self._app, _Server6 if ":" in host else _Server, _Handler)
        except OSError as error:
            raise FabricError(
                f"metrics cannot be served on {_shown(host)}:{port}: {error.strerror or error}; choose "
                "another port with --metrics, or 0 for a free one"
            ) from None
        close_on_fork(self._server.socket)
        self.url = f"http://{_shown(host)}:{self._server.server_port}/metrics"
        self._kept: dict[int, list[Sample]] = {}
        self._source: tuple[Fleet, Result, JoinManager] | None = None
        self._facts: Facts | None = None
        self._asked_at = -_FRESH_S
        self._one_asks = threading.Lock()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="bml-metrics", daemon=True
        )
        self._thread.start()

    def serve(self, fleet: Fleet, result: Result, join_manager: JoinManager) -> None:
        """Serve the metrics of this job from now on; before, there are none."""
        self._source = fleet, result, join_manager

    def close(self) -> None:
        """Free the port. Idempotent."""
        self._source = None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Return all metrics for prometheus_client, which calls this for every scrape, in its own thread."""
        with self._one_asks:
            facts = self._fresh()
            if facts is None:
                return iter(())
            self._kept.update({server: [*samples] for server, samples in facts.samples.items()})
            return families(facts, self._kept)

    def _fresh(self) -> Facts | None:
        """Ask the servers, unless that was done just before."""
        source = self._source
        if source is not None and time.monotonic() - self._asked_at >= _FRESH_S:
            self._facts = _ask(*source)
            self._asked_at = time.monotonic()
        return self._facts


def _ask(fleet: Fleet, result: Result, join_manager: JoinManager) -> Facts:
    answers = fleet.ask(("metrics", ""), _PATIENCE)
    samples = {server: answer["samples"] for server, answer in answers.items() if "samples" in answer}
    return Facts(
        result.spec.job,
        samples,
        sorted(join_manager.expected - samples.keys()),
        len(result.dead),
        fleet.spares.left,
    )


def families(facts: Facts, kept: Mapping[int, list[Sample]]) -> Iterator[Any]:
    """Return a family of prometheus_client for each metric that has a value.

    Of servers that do not answer (they are frozen, lost, or have ended) the newest counters are `kept`: sums
    over servers must not fall. Their gauges would say something of the past, and are left out.
    """
    values: dict[str, list[tuple[tuple[str, ...], Any]]] = {metric.name: [] for metric in TABLE}
    for server, samples in sorted(kept.items()):
        for sample in samples:
            if server in facts.samples or METRICS[sample.metric].kind != "gauge":
                labels = (facts.job, str(server), *sample.labels)
                values[sample.metric].append((labels, sample.value))
    for server in facts.samples:
        values["bml_server_answers"].append(((facts.job, str(server)), 1))
    for server in facts.silent:
        values["bml_server_answers"].append(((facts.job, str(server)), 0))
    values["bml_servers_lost"].append(((facts.job,), facts.n_lost))
    values["bml_spares"].append(((facts.job,), facts.n_spares))
    return (_family(METRICS[name], found) for name, found in values.items() if found)


def _family(metric: Metric, values: Iterable[tuple[tuple[str, ...], Any]]) -> Any:
    core = importlib.import_module("prometheus_client.core")
    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    family = kinds[metric.kind](metric.name, metric.help, labels=metric.all_labels)
    for labels, value in values:
        if metric.kind == "histogram":
            family.add_metric(labels, *_buckets(metric, Distribution(*value)))
        else:
            family.add_metric(labels, value)
    return family


def _buckets(metric: Metric, value: Distribution) -> tuple[list[tuple[str, int]], float]:
    bounds = [*map(str, metric.bounds), "+Inf"]
    return list(zip(bounds, value.cumulative, strict=True)), value.total


def _app_of(endpoint: Endpoint) -> Any:
    """The WSGI application of prometheus_client for one endpoint; nothing else of the process is in it."""
    try:
        client = importlib.import_module("prometheus_client")
    except ImportError:
        raise UsageError("metrics need prometheus_client: pip install 'bml[metrics]'") from None
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(endpoint)
    return client.make_wsgi_app(registry)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * _MOST_CLIENTS

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._open: dict[socket.socket, float] = {}
        """The connections of clients, and when they came. Threads take out their own."""

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Let no more clients in than there may be."""
        return len(self._open) < _MOST_CLIENTS

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread of its own."""
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut off clients that take too long; called again and again."""
        now = time.monotonic()
        for request, came in [*self._open.items()]:
            if now - came > _LASTS_S:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that hangs up, or asks nothing in its time; log what else goes wrong."""
        if not isinstance(sys.exception(), OSError):
            _LOG.exception("a scrape of the metrics failed")


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is nothing to hear of."""


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
