"""The Grafana dashboard of a job, as the JSON that Grafana imports. Made from the table's names alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from bml.metrics.table import METRICS, TABLE

_WIDTH, _HEIGHT = 8, 7  # three panels in a row of Grafana's 24 columns
_SCHEMA_VERSION = 39
_NAME = re.compile(r"\bbml_[a-z_]+\b")
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """One panel: `queries` are of the metrics' names, each with its legend; `unit` is one of Grafana's."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names in its queries, of the table or with `_bucket`, `_sum`, `_count`."""
        return tuple(name for query, _ in self.queries for name in _NAME.findall(query))

    @property
    def help(self) -> str:
        """What its metrics are, in words."""
        names = dict.fromkeys(name.removesuffix("_bucket") for name in self.metrics)
        return " ".join(METRICS[name].help for name in names)


def _rate(name: str, by: str = "") -> str:
    aggregate = f"sum by ({by}) " if by else "max"
    return f"{aggregate}(rate({name}{{$label=\"$job\"}}[$__rate_interval]))"  # fmt: skip


def _now(name: str, by: str = "") -> str:
    return f'max by ({by}) ({name}{{$label="$job"}})' if by else f'max({name}{{$label="$job"}})'


def _quantiles(name: str, window: str) -> tuple[tuple[str, str], ...]:
    rates = f'sum by (le) (rate({name}_bucket{{$label="$job"}}[{window}]))'
    return tuple((f"histogram_quantile({part}, {rates})", f"{part:.0%}") for part in (0.5, 0.95, 0.99))


_NIC = "{{server}}/{{level}}"
_ROWS: dict[str, tuple[Panel, ...]] = {
    "Training": (
        Panel("Step time", "s", _quantiles("bml_step_seconds", "$__rate_interval")),
        Panel("Steps per second", "none", ((_rate("bml_steps_total"), "steps"),)),
        Panel("Samples per second", "none", ((_rate("bml_samples_total"), "samples"),)),
        Panel("Goodput", "percentunit", ((_now("bml_goodput_ratio"), "of the rate without failures"),)),
        Panel("Exposed communication", "percentunit",
              ((_rate("bml_exposed_seconds_total", "server"), "server {{server}}"),)),
        Panel("Samples computed again, per second", "none",
              ((_rate("bml_samples_recomputed_total", "server"), "server {{server}}"),)),
    ),
    "Views": (
        Panel("View", "none", ((_now("bml_view_epoch"), "view"), (_now("bml_view_servers"), "servers"),
                               (_now("bml_servers_lost"), "lost"), (_now("bml_spares"), "spares"))),
        Panel("View changes", "none", ((_now("bml_view_changes_total", "reason"), "{{reason}}"),)),
        Panel("Servers that answer", "bool", ((_now("bml_server_answers", "server"), "server {{server}}"),)),
        Panel("Noticed after", "s", _quantiles("bml_noticed_seconds", "1h")),
        Panel("Recovered after", "s", _quantiles("bml_recovered_seconds", "1h")),
        Panel("Suspicions", "none", ((_now("bml_suspicions_total", "server, kind"), "{{server}}: {{kind}}"),
                                     (_now("bml_suspected_links", "server"), "now, server {{server}}"))),
    ),
    "NICs": (
        Panel("Sent", "Bps", ((_rate("bml_nic_sent_bytes_total", "server, level"), _NIC),)),
        Panel("Received", "Bps", ((_rate("bml_nic_received_bytes_total", "server, level"), _NIC),)),
        Panel("Carrier", "bool", ((_now("bml_nic_carrier", "server, level"), _NIC),)),
        Panel("Queue", "bytes", ((_now("bml_queued_bytes", "server, level"), _NIC),)),
        Panel("Frames in the queue", "none", ((_now("bml_queued_frames", "server, level"), _NIC),)),
        Panel("Heartbeats late by", "s", ((_now("bml_heartbeat_delay_seconds", "server, level"), _NIC),)),
        Panel("Copies per byte", "none", tuple(
            (f"{_rate(f'bml_copied_{way}_bytes_total', 'server')} / "
             f"{_rate(f'bml_nic_{way}_bytes_total', 'server')}", f"{way}, server {{{{server}}}}")
            for way in ("sent", "received"))),
        Panel("Read in a peer's memory", "Bps", tuple(
            (_rate(f"bml_zero_copy_{way}_bytes_total", "server"), f"{way}, server {{{{server}}}}")
            for way in ("sent", "received"))),
        Panel("Contributions copied", "Bps",
              ((_rate("bml_contribution_copied_bytes_total", "server"), "server {{server}}"),)),
    ),
    "State": (
        Panel("Training state to joiners", "bytes", tuple(
            (_now(f"bml_state_{way}_bytes_total", "server"), f"{way}, server {{{{server}}}}")
            for way in ("sent", "received"))),
        Panel("Checkpoint of step", "none", ((_now("bml_checkpoint_steps"), "step"),)),
        Panel("Age of the checkpoint", "s", ((_now("bml_checkpoint_age_seconds", "server"), "{{server}}"),)),
    ),
}  # fmt: skip
PANELS = tuple(panel for row in _ROWS.values() for panel in row)


def dashboard(ray: bool = False) -> dict[str, Any]:
    """Return the dashboard; with `ray` for Ray's endpoint, where all names begin with `ray_`.

    The metrics of the launcher are not there.

    The variable `label` is the label with the job's name: `job`, or `exported_job` if Prometheus scrapes
    without `honor_labels`.
    """
    labels = ("exported_job", "job") if ray else ("job", "exported_job")
    return {
        "uid": "bml-ray" if ray else "bml",
        "title": "bml, on Ray" if ray else "bml",
        "tags": ["bml"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables(labels, ray))},
        "panels": list(_panels(ray)),
    }


def _variables(labels: tuple[str, ...], ray: bool) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    options = [{"text": each, "value": each, "selected": each == labels[0]} for each in labels]
    yield {
        "name": "label", "label": "Label of the job", "type": "custom", "query": ",".join(labels),
        "current": options[0], "options": options,
    }  # fmt: skip
    query = f"label_values({_named('bml_view_epoch', ray)}, $label)"
    yield {
        "name": "job", "label": "Job", "type": "query", "datasource": _SOURCE,
        "query": {"query": query, "refId": "job"}, "refresh": 2, "sort": 2,
    }  # fmt: skip


def _panels(ray: bool) -> Iterator[dict[str, Any]]:
    y, number = 0, 0
    for title, row in _ROWS.items():
        panels = [_of_servers(panel) for panel in row] if ray else row
        panels = [panel for panel in panels if panel.queries]
        number += 1
        yield {
            "id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        }  # fmt: skip
        y += 1
        for at, panel in enumerate(panels):
            number += 1
            place = {"x": at % 3 * _WIDTH, "y": y + at // 3 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(panel, number, place, ray)
        y += -(-len(panels) // 3) * _HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int], ray: bool) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": _named(query, ray),
            "legendFormat": legend,
        }
        for at, (query, legend) in enumerate(panel.queries)
    ]  # fmt: skip
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def _of_servers(panel: Panel) -> Panel:
    """The panel without the metrics of the launcher."""
    launchers = {metric.name for metric in TABLE if not metric.of_servers}
    return panel._replace(
        queries=tuple(each for each in panel.queries if not launchers & {*_NAME.findall(each[0])})
    )


def _named(query: str, ray: bool) -> str:
    return _NAME.sub(lambda found: f"ray_{found[0]}", query) if ray else query
