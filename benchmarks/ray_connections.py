"""Jobs on a Ray whose TCP connections are shut down while they run: no server and no report may be lost.

    sudo python benchmarks/ray_connections.py --jobs 10 --seed 1

One Ray, one job after the other. At random moments of each job every established TCP connection that has the
driver or one of Ray's daemons at an end is shut down, as a firewall does that forgets, or one at random. What
servers and the coordinator say to each other is left alone: those connections belong to the job's own
detector. Needs root, as it duplicates other processes' descriptors (pidfd_getfd).
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import click
import numpy as np
import psutil

import bml
from bml.topology import parse

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


def outcome(seed: int, fabric: str) -> tuple[str, int]:
    """Run a job and cut connections; return its errors, or nothing, and how many connections were cut."""
    cutter, wrong = Cutter(seed), ""
    cutter.start()
    try:
        result = bml.launch(train, fabric)
        views = result.report["views"]
        if result.dead or len(views) != 1 or len(result.values) != parse(fabric).n_servers:
            wrong = f"dead {result.dead}, views {views}, values {result.values}"
    except bml.BmlError as error:
        wrong = f"{type(error).__name__}: {error}"
    cutter.stop()
    return wrong, cutter.cuts


@click.command()
@click.option("--jobs", default=10, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--fabric", default="bcube:2x1", show_default=True)
def main(jobs: int, seed: int, fabric: str) -> None:
    """Run the jobs; exit status 1 if one lost a server or a report."""
    from bml.cluster.ray.own import OwnRay

    own, bad, cuts = OwnRay(prints=False), 0, 0
    try:
        for number in range(seed * 1000, seed * 1000 + jobs):
            wrong, n_cuts = outcome(number, fabric)
            bad, cuts = bad + bool(wrong), cuts + n_cuts
            click.echo(f"seed {number}: {wrong or 'well'}; {n_cuts} connections shut down")
    finally:
        own.stop()
    click.echo(f"{jobs} jobs, {cuts} connections shut down, {bad} jobs not well")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
