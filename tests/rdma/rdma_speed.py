"""Speed of a pair against C, on a machine whose clock counts instructions, whatever else the host does.

A busy host would slow down one of the two and not the other, by any factor.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable
from statistics import median

from rdma_links import End

from bml.protocol.wire.frame import Header, Kind
from bml.transport import Poller
from bml.transport.verbs import VerbsSettings


def test_throughput_of_a_pair_against_c() -> None:
    """In separate processes, as `ib_write_bw` has them; measured in turn, medians are compared."""
    nbytes, turns = 16 << 20, 3
    ratios = {}
    with Stream(1 << 20) as stream:
        for size in (64 << 10, 256 << 10, 1 << 20):
            ours, theirs = [], []
            for _ in range(turns):
                ours.append(stream.rate(size, nbytes // size))
                theirs.append(c_rate(size, nbytes // size))
            ratios[size >> 10] = median(ours) / median(theirs)
            rates = f"ours {rounded(ours)}, ib_write_bw {rounded(theirs)} MiB/s"
            print(f"\n{size >> 10} KiB: {rates}, ratio of medians {ratios[size >> 10]:.2f}")
    assert min(ratios.values()) >= 0.85, ratios


def rounded(rates: list[float]) -> str:
    return " ".join(f"{rate:.1f}" for rate in rates)


class Stream:
    """Server 0, and in a process of its own server 1, which answers when it has got all frames of a step."""

    def __init__(self, most_nbytes: int) -> None:
        ports = [os.pipe(), os.pipe()]
        self.pid = os.fork()
        me = 1 if self.pid == 0 else 0
        self.poller = Poller()
        settings = VerbsSettings(timeout=18, window_nbytes=16 << 20, pool_nbytes=8 << 20)
        self.end = End(me, self.poller, settings, most_nbytes)
        os.write(ports[me][1], "{} {}\n".format(*self.end.transport.endpoints[0]).encode())
        with os.fdopen(ports[1 - me][0]) as file:
            host, port = file.readline().split()
        self.end.transport.set_peers({(1 - me, 0): (host, int(port))})
        self.step = 0
        if me == 1:
            self._answer()

    def rate(self, size: int, count: int) -> float:
        """MiB/s of so many frames of this size, until the answer is here."""
        self.until(lambda: self.end.transport.is_up(1, 0), "the link")
        self.step += 1
        self.end.received_from.clear()
        head = Header(Kind.REDUCE, 1, self.step, 0, 1, count, 0, size, size)
        started_s = time.monotonic()
        for _ in range(count):
            self.end.transport.send(1, 0, head, self.end.source[:size])
        self.until(lambda: self.end.received_from, "the answer")
        return size * count / (time.monotonic() - started_s) / (1 << 20)

    def until(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end_s, f"waited 30 s for {what}; losses {self.end.losses}"
            self.poller.poll(0.1)

    def _answer(self) -> None:
        """Serve until the other end is gone; never returns."""
        end = self.end
        while not end.losses:
            self.poller.poll(1.0)
            if end.received_from and len(end.received_from) == end.received_from[-1].signature:
                token = Header(Kind.TOKEN, 1, end.received_from[-1].step, 1, 0, 0, 0, 0, 0)
                end.received_from.clear()
                end.transport.send(0, 0, token, None)
        os._exit(0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.transport.close()
        self.poller.close()
        os.waitpid(self.pid, 0)


def c_rate(size: int, count: int) -> float:
    """MiB/s as `ib_write_bw` says it."""
    command = f"ib_write_bw -x 1 -F -s {size} -n {count} -p {18000 + random.randrange(2000)} -d".split()
    with subprocess.Popen([*command, "rxe0_1"], stdout=subprocess.DEVNULL):
        for _ in range(20):
            time.sleep(0.5)  # it does not say when it listens
            client = subprocess.run(
                [*command, "rxe1_1", "127.0.0.1"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for line in client.stdout.splitlines():
                if line.split()[:1] == [str(size)]:
                    return float(line.split()[3])
    raise AssertionError("ib_write_bw did not run")
