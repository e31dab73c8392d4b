"""Brings the metrics of a server to Ray: they appear at the Prometheus endpoint of its node, as `ray_bml_…`.

Ray's histograms take single values, of which a fast job has thousands a second. So the buckets that the
server counts are brought as they are, under the names and with the label `le` that Prometheus knows.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ray.util import metrics

from bml.cluster.server.server import Server
from bml.io.interruptible import Event
from bml.metrics.samples import Distribution, Sample
from bml.metrics.table import METRICS, TABLE, Metric

_PERIOD_S = 2.0
"""Ray itself collects every 10 s, if it is not set up otherwise."""
_ANSWER_S = 1.0  # a scrape waits no longer for a job that has not begun or is over


class Publisher:
    """Publishes the metrics of one server every `period_s`, in a thread, until its process ends."""

    def __init__(self, server: Server, period_s: float = _PERIOD_S):
        self._server, self._period_s = server, period_s
        self._labels = {"job": server.job, "server": str(server.server)}
        self._series = {name: each for metric in TABLE if metric.of_servers for name, each in _series(metric)}
        self._published: dict[tuple[str, tuple[str, ...]], float] = {}
        threading.Thread(target=self._run, name="bml-publisher", daemon=True).start()

    def _run(self) -> None:
        pause = Event()
        while not pause.wait(self._period_s):
            answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
            self._server.answer(("metrics", ""), answers.put)
            with suppress(queue.Empty):  # it has not begun, or is over
                for sample in answers.get(timeout=_ANSWER_S).get("samples", ()):
                    self._publish(sample)

    def _publish(self, sample: Sample) -> None:
        metric = METRICS[sample.metric]
        tags = self._labels | dict(zip(metric.labels, sample.labels, strict=True))
        if isinstance(sample.value, Distribution):
            for part, le, value in parts(metric, sample.value):
                self._series[f"{metric.name}_{part}"].set(value, tags | ({"le": le} if le else {}))
        elif metric.kind == "gauge":
            self._series[metric.name].set(sample.value, tags)
        else:
            key = (metric.name, sample.labels)
            more = sample.value - self._published.get(key, 0)
            if more > 0:
                self._published[key] = sample.value
                self._series[metric.name].inc(more, tags)


def parts(metric: Metric, value: Distribution) -> Iterator[tuple[str, str, float]]:
    """Return the series of a histogram: the part of the name, the label `le` or "", and the value."""
    for bound, count in zip((*map(str, metric.bounds), "+Inf"), value.cumulative, strict=True):
        yield "bucket", bound, count
    yield "sum", "", value.total
    yield "count", "", value.cumulative[-1]


def _series(metric: Metric) -> Iterator[tuple[str, Any]]:
    if metric.kind == "counter":  # Ray adds the _total
        name = metric.name.removesuffix("_total")
        yield metric.name, metrics.Counter(name, metric.help, metric.all_labels)
        return
    for name in metric.series:
        labels = (*metric.all_labels, "le") if name.endswith("_bucket") else metric.all_labels
        yield name, metrics.Gauge(name, metric.help, labels)
