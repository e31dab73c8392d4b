"""The process that holds torch's store for a node, and meets the other nodes in it.

Importing torch takes seconds, so a process of its own does it while the ranks start. On node 0 it hosts the
store; connections wait at a socket that the launcher has opened. It ends with the launcher.

    launcher    b"done"                           the ranks of this node have ended
    store       {"is": "met", "sizes", "node"}    all nodes are there: the number of ranks of each
                {"is": "waits", "nodes"}          for the launchers of these nodes, or for node 0's store
                {"is": "failed", "why"}           it cannot go on
                {"is": "lost"}                    the store of node 0 is gone
                {"is": "gone", "nodes"}           nodes that have ended without a word
                {"is": "over"}                    no node needs the store any more
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from bml.cluster.process.agent import packet
from bml.cluster.torchrun.nodes import BEAT_S, Heartbeats, NodeRecord, mismatch

MOST_NBYTES = 1 << 16
MEET_S = 600.0
"""How long nodes may take to appear: as long as torchrun waits."""
_SET_PDEATHSIG = 1
_SAY_AFTER_S = 3.0  # nodes that are started together are there sooner
_PREFIX = "bml/torchrun"


@dataclass(frozen=True)
class Wanted:
    """What the process is to do.

    Attributes:
        host: host of the store; `port`: its port.
        listening: descriptor of its listening socket; None where another node hosts it.
        node: rank of this node; None to be given one.
    """

    host: str
    port: int
    listening: int | None
    node: int | None
    n_nodes: int
    n_ranks: int
    run_id: str

    def argument(self) -> str:
        """Return this as the argument of the process."""
        return json.dumps(asdict(self))


class _Refused(Exception):
    """This node cannot take part."""


def main() -> None:
    """Hold the store for the launcher at the other end of the socket given as the first argument."""
    launcher = socket.socket(fileno=int(sys.argv[1]))
    # It may wait in torch for long, where it would not notice the end of the launcher.
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # for ranks, though sent to all processes of the job
        signal.signal(number, signal.SIG_IGN)

    def say(**message: Any) -> None:
        launcher.send(packet(message))

    try:
        _hold(Wanted(**json.loads(sys.argv[2])), launcher, say)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the launcher is gone
    except _Refused as refused:
        say(**{"is": "failed", "why": str(refused)})
    except Exception as error:
        say(**{"is": "failed", "why": f"{type(error).__name__}: {error}".splitlines()[0]})
    os._exit(0)


def _hold(wanted: Wanted, launcher: socket.socket, say: Callable[..., None]) -> None:
    import torch.distributed as dist

    options = {"wait_for_workers": False, "timeout": timedelta(seconds=MEET_S)}
    if wanted.listening is not None:
        whole = dist.TCPStore(
            wanted.host, wanted.port, is_master=True, master_listen_fd=wanted.listening, **options
        )
    else:
        whole = dist.TCPStore(wanted.host, wanted.port, is_master=False, **options)
    if wanted.n_nodes == 1:
        say(**{"is": "met", "sizes": [wanted.n_ranks], "node": 0})
        while launcher.recv(MOST_NBYTES) not in (b"", b"done"):
            pass
        say(**{"is": "over"})
        return
    node = _Node(dist.PrefixStore(_PREFIX, whole), wanted, launcher, say)
    try:
        node.meet()
        node.follow()
    except dist.DistNetworkError:
        say(**{"is": "lost"})


class _Node:
    """This node among the others."""

    def __init__(self, store: Any, wanted: Wanted, launcher: socket.socket, say: Callable[..., None]):
        self._store, self._launcher, self._say = store, launcher, say
        self._n_nodes = wanted.n_nodes
        self._record = NodeRecord(wanted.run_id, wanted.n_nodes, wanted.n_ranks, uuid.uuid4().hex)
        if wanted.node is not None:
            self._node = wanted.node
        else:  # the node that hosts the store is 0
            self._node = 0 if wanted.listening is not None else int(store.add("arrivals", 1))
        if self._node >= self._n_nodes:
            raise _Refused(
                f"all {self._n_nodes} nodes are there already: give the --node-rank of the node that it "
                "replaces"
            )

    def meet(self) -> None:
        """Show this node's record, and wait for those of the others."""
        self._show()
        began = time.monotonic()
        said: list[int] = []
        while missing := [each for each in self._others() if not self._store.check([f"node/{each}"])]:
            waited_s = time.monotonic() - began
            if waited_s > MEET_S:
                raise _Refused(f"nodes {missing} did not appear within {MEET_S:.0f} s")
            if waited_s > _SAY_AFTER_S and missing != said:
                self._say(**{"is": "waits", "nodes": missing})
                said = missing
            self._beat_until_asked(0.1)
        records = {each: self._record_of(each) for each in self._others()}
        for each, record in records.items():
            if why := mismatch(each, self._record, record):
                raise _Refused(why)
        records[self._node] = self._record
        sizes = [records[each].n_ranks for each in range(self._n_nodes)]
        self._say(**{"is": "met", "sizes": sizes, "node": self._node})

    def follow(self) -> None:
        """Count up this node's number until its ranks have ended. Node 0 then waits for the others."""
        while not self._beat_until_asked(BEAT_S):
            pass
        self._store.set(f"done/{self._node}", "1")
        if self._node == 0:
            self._wait_for_others()
        self._say(**{"is": "over"})

    def _wait_for_others(self) -> None:
        heartbeats, gone = Heartbeats(), set[int]()
        said = False
        while left := [each for each in self._others() if not self._store.check([f"done/{each}"])]:
            if not said:
                self._say(**{"is": "waits", "nodes": left})
                said = True
            counts = {each: int(self._store.add(f"heartbeats/{each}", 0)) for each in left}
            gone = set(heartbeats.gone(counts, time.monotonic()))
            if gone >= set(left):
                self._say(**{"is": "gone", "nodes": sorted(gone)})
                return
            self._beat_until_asked(0.1)

    def _show(self) -> None:
        """Show this node's record. The launcher of a node that is gone may be replaced."""
        key, own = f"node/{self._node}", json.dumps(self._record.as_json())
        if self._store.compare_set(key, "", own).decode() == own:
            return
        heartbeats = Heartbeats()
        while not heartbeats.gone({0: int(self._store.add(f"heartbeats/{self._node}", 0))}, time.monotonic()):
            if self._store.check([f"done/{self._node}"]):
                break
            if heartbeats.moved:
                raise _Refused(f"another launcher is node {self._node} already: give each its --node-rank")
            self._asked(0.1)
        self._store.delete_key(f"done/{self._node}")
        self._store.set(key, own)

    def _others(self) -> list[int]:
        return [each for each in range(self._n_nodes) if each != self._node]

    def _record_of(self, node: int) -> NodeRecord:
        return NodeRecord(**json.loads(self._store.get(f"node/{node}").decode()))

    def _beat_until_asked(self, within_s: float) -> bool:
        """Count up once and wait so long; returns True if the ranks have ended."""
        self._store.add(f"heartbeats/{self._node}", 1)
        return self._asked(within_s)

    def _asked(self, within_s: float) -> bool:
        """Wait so long for the launcher's word. Raises BrokenPipeError if the launcher is gone."""
        if not select.select([self._launcher], [], [], within_s)[0]:
            return False
        if not self._launcher.recv(MOST_NBYTES):
            raise BrokenPipeError
        return True
