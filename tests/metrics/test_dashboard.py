"""The dashboard: every query uses metrics of the table alone, with labels that they have."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bml.metrics.dashboard import PANELS, dashboard
from bml.metrics.table import TABLE

SERIES = {name: metric for metric in TABLE for name in metric.series}


def queries(ray: bool) -> list[str]:
    return [target["expr"] for panel in dashboard(ray)["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("ray", [False, True])
def test_queries_use_the_table_alone_and_all_of_it(ray: bool) -> None:
    prefix = "ray_" if ray else ""
    used = {name for query in queries(ray) for name in re.findall(r"\b(?:ray_)?bml_\w+", query)}
    assert used <= {prefix + name for name in SERIES}
    shown = {SERIES[name.removeprefix(prefix)].name for name in used}
    assert shown == {metric.name for metric in TABLE if metric.of_servers or not ray}


def test_queries_group_by_labels_that_their_metrics_have() -> None:
    for query in queries(ray=False):
        has = set.intersection(
            *({*SERIES[name].all_labels, "le"} for name in re.findall(r"\bbml_\w+", query))
        )
        for labels in re.findall(r"by \(([^)]*)\)", query):
            assert {label.strip() for label in labels.split(",")} <= has, query


def test_counters_and_buckets_are_not_shown_as_they_are() -> None:
    """A counter that is shown without a rate is one of which the rare jumps are to be seen."""
    rare = {"bml_view_changes_total", "bml_suspicions_total"} | {
        f"bml_state_{way}_bytes_total" for way in ("sent", "received")
    }
    for query in queries(ray=False):
        for name in re.findall(r"\bbml_\w+", query):
            if SERIES[name].kind != "gauge" and name not in rare:
                assert f"rate({name}{{" in query


def test_it_is_what_grafana_imports() -> None:
    made: dict[str, Any] = json.loads(json.dumps(dashboard()))
    assert made["uid"]
    assert made["schemaVersion"] >= 36
    ids = [panel["id"] for panel in made["panels"]]
    assert len(ids) == len(set(ids))
    variables = {each["name"]: each for each in made["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for panel in made["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            asked = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert asked == {"label", "job"} <= variables.keys()
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(refs) == len(set(refs))


@pytest.mark.parametrize("ray", [False, True])
def test_panels_do_not_overlap_and_say_what_they_show(ray: bool) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard(ray)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert all(panel.help for panel in PANELS)
