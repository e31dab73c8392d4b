"""The table of metrics follows Prometheus' conventions, and every way to publish them has all of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import bml.cluster.launcher.metrics
import bml.cluster.server.metric_samples
from bml.metrics.table import METRICS, REASONS, SUSPICION_KINDS, TABLE, Metric

BASE_UNITS = ("seconds", "bytes")


@pytest.mark.parametrize("metric", TABLE, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"bml(_[a-z]+)+", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    stem = metric.name.removesuffix("_total")
    for unit in BASE_UNITS:
        assert (metric.unit == unit) == stem.endswith(f"_{unit}"), "a base unit is the end of the name"
    assert not re.search(r"_(ms|us|mib|kib|mb|kb|percent)$", stem)
    assert metric.help.endswith(".")
    assert metric.unit


def test_each_metric_has_a_value_and_each_value_a_metric() -> None:
    """Read from the two modules that give values: which are given in a job depends on what happens in it."""
    named: set[str] = set()
    for module in (bml.cluster.server.metric_samples, bml.cluster.launcher.metrics):
        tree = ast.parse(Path(module.__file__).read_text())
        texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        named |= {text for text in texts if isinstance(text, str) and re.fullmatch(r"bml(_[a-z]+)+", text)}
    assert named == {metric.name for metric in TABLE}


def test_names_are_unique_also_as_series() -> None:
    series = [name for metric in TABLE for name in metric.series]
    assert len(series) == len(set(series))
    assert len(METRICS) == len(TABLE)


def test_labels_are_few_and_never_a_step() -> None:
    labels = {label for metric in TABLE for label in metric.all_labels}
    assert labels == {"job", "server", "level", "reason", "kind"}
    assert all(metric.all_labels[0] == "job" for metric in TABLE)
    assert len(REASONS) == len(set(REASONS))
    assert len(SUSPICION_KINDS) == len(set(SUSPICION_KINDS))


@pytest.mark.parametrize("metric", TABLE, ids=lambda metric: metric.name)
def test_histograms_have_bounds_that_grow(metric: Metric) -> None:
    assert bool(metric.bounds) == (metric.kind == "histogram")
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert all(bound > 0 for bound in metric.bounds)
