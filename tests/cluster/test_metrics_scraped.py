"""Metrics as operators get them: a real Prometheus scrapes a job that loses a server, and is asked."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import wait_for

import bml
from bml.metrics.dashboard import dashboard

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

UNPACKED = Path(__file__).resolve().parents[2] / "build/prometheus/usr/bin/prometheus"
PROMETHEUS = shutil.which("prometheus") or (str(UNPACKED) if UNPACKED.exists() else None)
STEPS, STRUCK, LENGTH = 25, 10, 30_000
VICTIM, SURVIVORS = 4, 8


def until_told(path: Path) -> Callable[[bml.Session], int]:
    def train(session: bml.Session) -> int:
        """The steps, then a pause, in which the figures stand still, until the file is there."""
        w = session.empty(LENGTH)
        w[:] = 0
        session.state(params=w)

        def gradient(indices: Any) -> Any:
            return np.full(LENGTH, len(indices), np.float32)

        for batch in session.batches(36 * STEPS, global_batch=36, epochs=1):
            w += batch.allreduce(gradient(batch.indices), gradient)
        while not path.exists():
            time.sleep(0.05)
        return STEPS

    return train


class Asked:
    """A running Prometheus, asked over its HTTP API."""

    def __init__(self, url: str):
        self.url = url
        self.at_s = 0.0

    def now(self) -> None:
        """Ask as of this moment from now on: a later scrape that fails would make every series stale.

        As of a second ago: a scrape that had begun then is over.
        """
        self.at_s = time.time() - 1

    def query(self, text: str) -> list[dict[str, Any]]:
        words = urllib.parse.urlencode({"query": text, "time": self.at_s})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{words}", timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        series: list[dict[str, Any]] = found["data"]["result"]
        return series

    def values(self, text: str, label: str = "server") -> dict[str, float]:
        return {each["metric"].get(label, ""): float(each["value"][1]) for each in self.query(text)}

    def twice(self, text: str) -> list[str]:
        """The servers of which the last two scrapes have what a query asks for; none while it is not up.

        The other queries are asked as of the same moment.
        """
        self.now()
        try:
            return [*self.values(f"({text}) and (count_over_time(({text})[5s:500ms]) >= 2)")]
        except OSError:
            return []


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Asked]:
    """A Prometheus on loopback that scrapes one target alone, twice a second."""
    assert PROMETHEUS is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        "scrape_configs:\n"
        f"- {{job_name: bml, honor_labels: true, static_configs: [{{targets: ['{target}']}}]}}\n"
    )
    words = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([PROMETHEUS, *words], stdout=log, stderr=log)
        try:
            yield Asked(f"http://{address}")
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.skipif(PROMETHEUS is None, reason="needs the program prometheus: bash .ci/packages")
def test_prometheus_has_what_the_report_has(tmp_path: Path) -> None:
    told = tmp_path / "told"
    fault = f"kill:{VICTIM}@step={STRUCK}"
    settings = {"fabric": "bcube:3x2", "launcher": "processes", "transport": "tcp", "algorithm": "bml"}
    with bml.start(until_told(told), **settings, faults=fault, metrics=0) as job:
        with prometheus(tmp_path, urllib.parse.urlsplit(job.metrics_url).netloc) as asked:
            wait_for(lambda: len(asked.twice(f"bml_steps_total == {STEPS}")) == SURVIVORS, 40)
            seen = {name: asked.values(name) for name in ONCE}
            reasons = asked.values("max by (reason) (bml_view_changes_total)", "reason")
            sent = asked.values("sum by (server) (bml_nic_sent_bytes_total)")
            steps = asked.values('bml_step_seconds_count{server="0"}')
            shown = shown_by(asked, job.name)
        told.touch()
        report = job.wait().report
    check(report, seen, reasons, sent, steps)
    assert not {title for title, found in shown.items() if not found} - EMPTY


ONCE = (
    "bml_view_epoch", "bml_view_servers", "bml_samples_total", "bml_samples_recomputed_total",
    "bml_noticed_seconds_count", "bml_recovered_seconds_sum", "bml_servers_lost", "bml_server_answers",
)  # fmt: skip
#: Panels for what this job does not have: a carrier on loopback, checkpoints.
EMPTY = {"Carrier", "Checkpoint of step", "Age of the checkpoint"}


def check(
    report: dict[str, Any],
    seen: dict[str, dict[str, float]],
    reasons: dict[str, float],
    sent: dict[str, float],
    steps: dict[str, float],
) -> None:
    survivors = [str(server) for server in report["metrics"]]
    assert len(survivors) == SURVIVORS
    assert report["steps"] == STEPS
    view = report["views"][-1]
    assert seen["bml_view_epoch"] == dict.fromkeys(survivors, view["epoch"])
    assert seen["bml_view_servers"] == dict.fromkeys(survivors, SURVIVORS)
    assert sum(reasons.values()) == len(report["views"]) - 1
    assert reasons["server"] >= 1
    assert {each: seen["bml_samples_total"][each] for each in survivors} == dict.fromkeys(
        survivors, 36 * STEPS
    )
    lost_share = seen["bml_samples_recomputed_total"]
    assert sum(lost_share[each] for each in survivors) == 36 // 9, (
        "the share of the dead server, by the others"
    )
    assert {seen["bml_noticed_seconds_count"][each] for each in survivors} == {reasons["server"]}
    for server in survivors:
        assert seen["bml_recovered_seconds_sum"][server] > 0
    assert seen["bml_servers_lost"] == {"": 1}
    assert seen["bml_server_answers"] == dict.fromkeys(survivors, 1)
    # The first step is not timed, and one more is the library's own: servers compare their states.
    assert steps == {"0": STEPS - 1 + 1}
    # Every step moves each byte of the vector up a spanning tree and down again.
    least = (STEPS - STRUCK) * 2 * (SURVIVORS - 1) * LENGTH * 4
    at_end = {
        server: sum(link["nbytes_sent"] for link in metrics["links"].values())
        for server, metrics in report["metrics"].items()
    }
    assert sum(sent[each] for each in survivors) >= least
    for server, nbytes in at_end.items():
        assert 0 < sent[str(server)] <= nbytes


def shown_by(asked: Asked, job: str) -> dict[str, bool]:
    """Ask every query of the dashboard; returns for each panel whether Prometheus has values for it."""
    found = {}
    for panel in dashboard()["panels"]:
        queries = [target["expr"] for target in panel.get("targets", ())]
        for name, value in {"$label": "job", "$job": job, "$__rate_interval": "20s"}.items():
            queries = [query.replace(name, value) for query in queries]
        assert not re.search(r"\$", "".join(queries))
        if queries:
            found[panel["title"]] = all(list(map(asked.query, queries)))
    return found
