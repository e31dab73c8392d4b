"""Run in a process of its own: forks in a thread while processes of ours start; prints what children hold.

In the process of pytest other threads, such as Ray's, may open a socket at any time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from bml.cluster.fleets.fork_server import ForkServer
from bml.cluster.formation.coordinator_process import CoordinatorProcess
from bml.cluster.process.starting import start_agent

STARTS: dict[str, Callable[[], Callable[[], None]]] = {
    "coordinators": lambda: CoordinatorProcess().close,
    "fork server": lambda: ForkServer(prints=False).close,
    "agent": lambda: start_agent(os.environ).hang_up,
}
N_STARTS, N_CHILDREN, MOST_CHILDREN = 10, 20, 500


class Children:
    """Children that another thread forks one after the other, each alive until the end."""

    def __init__(self) -> None:
        self.descriptors: list[set[str]] = []
        """What each of them has open."""
        self._children: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fork_on)

    def __enter__(self) -> Children:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def _fork_on(self) -> None:
        parent = os.getpid()
        while not self._over.is_set() and len(self._children) < MOST_CHILDREN:
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writing, b".")
                while os.getppid() == parent:  # nobody is left where this program is killed
                    time.sleep(2)
                os._exit(0)
            self._children.append(child)
            os.close(writing)
            os.read(reading, 1)  # it has closed what is not its own
            os.close(reading)
            self.descriptors.append(set(open_in(child)))


def open_in(process: int) -> Iterator[str]:
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield str(entry.readlink())


def main(kind: str) -> None:
    before, n_starts = set(open_in(os.getpid())), 0
    with Children() as children:
        while n_starts < N_STARTS or len(children.descriptors) < N_CHILDREN:  # a busy machine forks slowly
            STARTS[kind]()()
            n_starts += 1
    of_ours = before | {"anon_inode:[eventfd]"}  # with which a fork server says that a process has ended
    print(json.dumps([sorted(each - of_ours) for each in children.descriptors]))


if __name__ == "__main__":
    main(sys.argv[1])
