"""Metrics at Ray's own Prometheus endpoint: the actors bring them there."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import wait_for
from prometheus_client.parser import text_string_to_metric_families

import bml

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]
STEPS = 12
NAMES = [
    f"ray_bml_{each}" for each in ("view_epoch", "samples_total", "step_seconds_count", "step_seconds_sum")
]


def test_the_nodes_endpoint_has_what_the_servers_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "500")
    told = tmp_path / "told"

    def train(session: bml.Session) -> None:
        for batch in session.batches(20 * STEPS, global_batch=20, epochs=1):
            batch.allreduce(np.full(100, len(batch.indices), np.float32))
        while not told.exists():
            time.sleep(0.05)

    def found() -> dict[tuple[Any, ...], float]:
        node = ray.nodes()[0]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            (each.name, each.labels["server"], each.labels.get("le", "")): each.value
            for family in families
            for each in family.samples
            if each.name.startswith("ray_bml_") and each.labels["job"] == job.name
        }

    with bml.start(train, fabric="bcube:2x2", launcher="ray", metrics="ray") as job:

        def whole() -> Any:
            """All that is looked at below: an export may fall between two series."""
            now = found()
            all_there = {(name, server, "") for name in NAMES for server in "0123"} <= now.keys()
            buckets = all(("ray_bml_step_seconds_bucket", server, "+Inf") in now for server in "0123")
            stepped = all(now.get(("ray_bml_steps_total", server, "")) == STEPS for server in "0123")
            return all_there and buckets and stepped and now

        values = wait_for(whole, 60)
        told.touch()
        assert job.wait().report["steps"] == STEPS
    for server in "0123":
        assert values["ray_bml_view_epoch", server, ""] == 1
        assert values["ray_bml_samples_total", server, ""] == 20 * STEPS
        timed = values["ray_bml_step_seconds_count", server, ""]
        assert timed >= STEPS - 1
        assert values["ray_bml_step_seconds_bucket", server, "+Inf"] == timed
        assert values["ray_bml_step_seconds_sum", server, ""] > 0
