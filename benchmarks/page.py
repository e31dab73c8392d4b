"""What the live page costs: steps without it, with one browser, and with many that stall, in turn.

    python benchmarks/page.py --nbytes 65536 --streams 50 --rounds 6

Servers share the machine with the launcher, which makes the page twice a second while somebody looks. A
stalled browser opens a stream of events and reads nothing.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import bml
from bml.web.served import ServedPage


def train(session: Any, nbytes: int, for_s: float) -> float:
    """Return the median time of a step, in seconds."""
    vector = session.empty(nbytes // 4, "float32")
    vector[...] = 1
    for _ in range(20):
        session.allreduce(vector)
    times: list[float] = []
    over = False
    while not over:
        began_s = time.perf_counter()
        for _ in range(20):
            session.allreduce(vector)
        times.append((time.perf_counter() - began_s) / 20)
        over = bool(session.allreduce(np.array([sum(times) * 20 > for_s], "i4"), op="max")[0])
    return statistics.median(times)


@contextmanager
def looked_at(job: Any, streams: int, stalled: bool) -> Iterator[None]:
    """Serve the page of a job to so many browsers meanwhile."""
    with ExitStack() as held:
        if streams:
            page = held.enter_context(ServedPage(0, False))
            page.follow(job)
            parts = urlsplit(page.url)
            for _ in range(streams):
                sock = held.enter_context(socket.create_connection(("127.0.0.1", parts.port), 10))
                host = f"Host: 127.0.0.1:{parts.port}"
                sock.sendall(f"GET /api/events?{parts.query} HTTP/1.1\r\n{host}\r\n\r\n".encode())
                if not stalled:
                    threading.Thread(target=_read, args=(sock,), daemon=True).start()
        yield


def _read(sock: socket.socket) -> None:
    try:
        while sock.recv(65536):
            pass
    except OSError:
        pass


def measured(fabric: str, nbytes: int, for_s: float, streams: int, stalled: bool) -> float:
    """The median time of a step on server 0 of one job, in seconds."""
    with (
        bml.start(
            partial(train, nbytes=nbytes, for_s=for_s), fabric, launcher="processes", transport="tcp"
        ) as job,
        looked_at(job, streams, stalled),
    ):
        return float(job.wait().values[0])


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fabric", default="bcube:2x2")
    parser.add_argument("--nbytes", type=int, default=65536)
    parser.add_argument("--for-s", type=float, default=4.0)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    ways = {
        "nobody": (0, False),
        "one browser": (1, False),
        f"{given.streams} stalled": (given.streams, True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds):
        names = [*ways] if number % 2 == 0 else [*ways][::-1]  # a drift of the machine cancels
        for name in names:
            times[name].append(measured(given.fabric, given.nbytes, given.for_s, *ways[name]))
    usual_s = statistics.median(times["nobody"])
    for name, found in times.items():
        middle_s = statistics.median(found)
        print(
            f"{name}: {middle_s * 1e3:.3f} ms a step ({min(found) * 1e3:.3f} to {max(found) * 1e3:.3f}), "
            f"{middle_s / usual_s - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
