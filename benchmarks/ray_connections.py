"""Jobs on a Ray whose TCP connections are shut down while they run: no server and no report may be lost.

    sudo python benchmarks/ray_connections.py --jobs 10 --seed 1

One Ray, one job after the other. At random moments of each job every established TCP connection that has the
driver or one of Ray's daemons at an end is shut down, as a firewall does that forgets, or one at random. What
servers and the coordinator say to each other is left alone: those connections belong to the job's own
detector. Needs root, as it duplicates other processes' descriptors (pidfd_getfd).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bml

_PIDFD_GETFD = 438
_ACTORS = ("ray::ServerActor", "ray::CoordinatorActor")
STEPS = 300
PAUSE_S = 0.01


def train(session: Any) -> int:
    """Steps with a pause; returns how many there were."""
    n = len(session.contributors)
    for _ in range(STEPS):
        assert session.allreduce(np.ones(1000, "f4"))[0] == n
        time.sleep(PAUSE_S)
    return STEPS


def family() -> dict[int, psutil.Process]:
    """This process and all below it, which has Ray's daemons and workers."""
    me = psutil.Process()
    return {each.pid: each for each in (me, *me.children(recursive=True))}


def connections() -> list[tuple[int, int]]:
    """(process, descriptor) of one end of every connection with the driver or a daemon at an end."""
    ends: dict[tuple[Any, Any], tuple[int, int]] = {}
    actors: set[int] = set()
    for pid, process in family().items():
        with suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(_ACTORS):
                actors.add(pid)
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_ESTABLISHED:
                    ends[tuple(each.laddr), tuple(each.raddr)] = (pid, each.fd)
    found = []
    for (local, remote), (pid, descriptor) in ends.items():
        other = ends.get((remote, local), (0, 0))[0]
        if not {pid, other} <= actors and (pid not in actors or other == 0):
            found.append((pid, descriptor))
    return found


def shut_down(pid: int, descriptor: int) -> None:
    """Shut down a socket of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        copy = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(process)
    with socket.socket(fileno=copy) as sock:
        sock.shutdown(socket.SHUT_RDWR)


class Cutter(threading.Thread):
    """Shuts connections down at random moments until it is stopped."""

    def __init__(self, seed: int):
        super().__init__(daemon=True)
        self._draw = random.Random(seed)
        self._stop_it = threading.Event()
        self.cuts = 0

    def run(self) -> None:
        while not self._stop_it.wait(self._draw.uniform(0.1, 2.0)):
            found = connections()
            if found and self._draw.random() < 0.5:
                found = [self._draw.choice(found)]
            for pid, descriptor in found:
                with suppress(OSError):  # it is closed, or not a socket any more
                    shut_down(pid, descriptor)
                    self.cuts += 1

    def stop(self) -> None:
        self._stop_it.set()
        self.join()


def main() -> None:
    """Run the jobs; exit status 1 if one lost a server or a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fabric", default="bcube:2x1")
    options = parser.parse_args()
    from bml.cluster.ray_own import OwnRay

    own, bad = OwnRay(prints=False), 0
    try:
        for number in range(options.jobs):
            seed, begun = options.seed * 1000 + number, time.monotonic()
            cutter = Cutter(seed)
            cutter.start()
            outcome = "well"
            try:
                result = bml.launch(train, options.fabric)
                n = len(result.values)
                if result.dead or len(result.report["views"]) != 1 or n != bml_servers(options.fabric):
                    outcome = f"dead {result.dead}, views {result.report['views']}, values {result.values}"
            except bml.BmlError as error:
                outcome = f"{type(error).__name__}: {error}"
            cutter.stop()
            bad += outcome != "well"
            took_s = time.monotonic() - begun
            print(f"seed {seed}: {outcome}; {cutter.cuts} connections shut down, {took_s:.1f} s", flush=True)
    finally:
        own.stop()
    print(f"{options.jobs} jobs, {bad} not well")
    sys.exit(bad > 0)


def bml_servers(fabric: str) -> int:
    from bml.topology import parse

    return parse(fabric).n_servers


if __name__ == "__main__":
    main()
