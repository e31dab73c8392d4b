"""The timeline of a simulated step in the format of Chrome's traces, which ui.perfetto.dev shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from bml.lab.flows.simulate import Outcome

MOST_EVENTS = 400_000
"""Transfers that are written; later ones are left out, and that is said."""


def timeline(outcome: Outcome) -> dict[str, Any]:
    """Return the trace: a process for each server, a track for each of its connections, times in µs.

    A slice lasts from the first byte that is sent to the last; `arrived` says when it was received.
    """
    network, traffic = outcome.network, outcome.traffic
    sends = np.flatnonzero(network.connection >= 0)
    shown = sends[np.argsort(outcome.began[sends], kind="stable")][:MOST_EVENTS]
    servers = np.unique(traffic.sender[shown]).tolist()
    events = [_named("process_name", server, 0, f"server {server}") for server in servers]
    for connection in np.unique(network.connection[shown]).tolist():
        ends = (int(each[connection]) for each in (network.sender, network.level, network.receiver))
        server, level, peer = ends
        events.append(_named("thread_name", server, connection, f"NIC {level} to server {peer}"))
    columns = (
        traffic.sender[shown],
        network.connection[shown],
        traffic.priority[shown] % 2,
        outcome.nbytes[shown],
        outcome.began[shown] * 1e6,
        (outcome.sent - outcome.began)[shown] * 1e6,
        outcome.arrived[shown] * 1e6,
    )
    for server, connection, summed, nbytes, began, lasted, arrived in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        events.append(
            {
                "name": "sum" if summed else "result",
                "ph": "X",
                "pid": server,
                "tid": connection,
                "ts": round(began, 3),
                "dur": round(lasted, 3),
                "args": {"nbytes": round(nbytes), "arrived_us": round(arrived, 3)},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "leftOut": len(sends) - len(shown)}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
