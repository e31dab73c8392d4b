"""Ray drains one node after the other under a job: has each server left before its node ends?

    python benchmarks/ray_drains.py --drains 20

A Ray of its own, with one node more than servers, all on this machine. Each drain takes the node of the next
server, with a deadline. It shows after how many seconds a view without the server was in force, the node had
ended by itself, and the server contributed again, on another node.
"""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

import bml

SERVERS = 4
_PREEMPTION = 2  # Ray's DRAIN_NODE_REASON_PREEMPTION
_STORE_NBYTES = 80 << 20
_WITHIN_S = 300.0
_PAUSE_S = 0.05
STOP = "BML_BENCHMARK_STOP"


def train(session: Any) -> int:
    """Steps with a pause, until there is a file with the name that the nodes were started with."""
    steps, session_stop = 0, os.environ[STOP]
    w = session.empty(100_000)
    w[:] = 0
    session.state(params=w)
    for _ in session.steps(10**9):
        time.sleep(_PAUSE_S)
        stop = session.allreduce(np.array([os.path.exists(session_stop)]).astype("i4"), op="max")
        w += session.allreduce(np.ones(100_000, "f4"))
        steps += 1
        if stop[0]:
            break
    return steps


def until(what: Callable[[], Any], why: str, job: Any) -> Any:
    """Return the first true value of a function."""
    deadline = time.monotonic() + _WITHIN_S
    while not (found := what()):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {_WITHIN_S:.0f} s: {why}; the job is {job.status()}")
        time.sleep(0.02)
    return found


class Seen:
    """The views of a job, each with the time at which it was heard of."""

    def __init__(self) -> None:
        self._views: list[tuple[float, dict[str, Any]]] = []
        self._changing = threading.Lock()

    def changed(self, snapshot: dict[str, Any]) -> None:
        """Take a snapshot of the job."""
        with self._changing:
            self._views.append((time.monotonic(), snapshot))

    def without(self, server: int, since: float) -> float | None:
        """When the first view without this server came."""
        with self._changing:
            return next((at for at, now in self._views if at > since and server not in now["members"]), None)

    def is_whole(self) -> bool:
        """Whether all servers contribute."""
        with self._changing:
            last = self._views[-1][1] if self._views else {"members": (), "learners": ()}
        return len(last["members"]) == SERVERS and not last["learners"]


def has_ended(node: str) -> bool:
    """Whether Ray has this node no more."""
    import ray

    return all(each["NodeID"] != node or not each["Alive"] for each in ray.nodes())


def drained(cluster: Any, seen: Seen, job: Any, server: int, deadline_s: float) -> tuple[float, float, float]:
    """Drain the node of a server; return the seconds until it had left, the node ended, and it was back."""
    import ray
    from ray._raylet import GcsClient

    node = ray.get(job._fleet._actors[server].node.remote())
    begun = time.monotonic()
    ends_ms = int((time.time() + deadline_s) * 1000)
    accepted, why = GcsClient(address=cluster.address).drain_node(node, _PREEMPTION, "a benchmark", ends_ms)
    if not accepted:
        raise SystemExit(f"Ray does not drain: {why}")
    left = until(lambda: seen.without(server, begun), f"server {server} left", job) - begun
    until(lambda: has_ended(node), "the node ended", job)
    ended = time.monotonic() - begun
    cluster.remove_node(next(each for each in cluster.worker_nodes if each.node_id == node))
    cluster.add_node(num_cpus=1, object_store_memory=_STORE_NBYTES)
    until(seen.is_whole, f"server {server} came again", job)
    return left, ended, time.monotonic() - begun


@click.command()
@click.option("--drains", default=20, show_default=True)
@click.option("--deadline-s", default=20.0, show_default=True)
def main(drains: int, deadline_s: float) -> None:
    """Drain nodes; exit status 1 if a node had not ended by its deadline."""
    folder = Path(tempfile.mkdtemp(prefix="drains-"))
    (folder / "ray").mkdir()
    stop = folder / "stop"
    os.environ |= {
        STOP: str(stop),
        "RAY_TMPDIR": str(folder),  # others look for the newest Ray of this machine in the usual folder
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_enable_metrics_collection": "0",
    }
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_NBYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(SERVERS + 1):
            cluster.add_node(num_cpus=1, object_store_memory=_STORE_NBYTES)
        seen, found = Seen(), []
        with bml.start(
            train,
            "bcube:2x2",
            address=cluster.address,
            rejoin=True,
            start_s=_WITHIN_S,
            on_change=seen.changed,
        ) as job:
            until(seen.is_whole, "all servers came", job)
            for number in range(drains):
                left, ended, back = drained(cluster, seen, job, number % SERVERS, deadline_s)
                found.append((left, ended, back))
                click.echo(
                    f"drain {number}: server {number % SERVERS} left after {left:.2f} s, its node ended "
                    f"after {ended:.2f} s, it contributed again after {back:.1f} s"
                )
            stop.touch()
            job.wait(_WITHIN_S)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    in_time = sum(ended < deadline_s for _, ended, _ in found)
    left, ended, back = (list(each) for each in zip(*found, strict=True))
    click.echo(
        f"{in_time} of {drains} in time; left: median {statistics.median(left):.2f} s, "
        f"at most {max(left):.2f} s; ended: at most {max(ended):.2f} s; "
        f"back: median {statistics.median(back):.1f} s"
    )
    sys.exit(in_time < drains)


if __name__ == "__main__":
    main()
