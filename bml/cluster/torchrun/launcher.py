"""The launcher of a node's ranks: starts them, shows their output, and follows them to their end."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from bml.cluster.fleets.fork_server import LONG_COPIES
from bml.cluster.formation.secret import SECRET
from bml.cluster.process.starting import Helper, start_agent
from bml.cluster.torchrun.layout import THREADS, Layout, threads_of
from bml.cluster.torchrun.nodes import GONE_S
from bml.cluster.torchrun.output import Pipe, Show
from bml.cluster.torchrun.processes import listen, start_store
from bml.cluster.torchrun.ranks import Ranks, how
from bml.cluster.torchrun.store import Wanted
from bml.cluster.torchrun.strikes import Strikes, strikes_of
from bml.errors import FabricError, StartError

_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals with which schedulers of clusters give notice to programs."""
_LAST_WORDS_S = 1.0
"""How long output is awaited of ranks that were killed with their parent, in seconds."""


@dataclass(frozen=True)
class Request:
    """The ranks that are to be started on this node.

    Attributes:
        command: command of every rank.
        n_ranks: number of ranks of this node.
        n_nodes: number of nodes.
        node: rank of this node; None to be given one where the nodes meet.
        endpoint: host and port of the store; port 0 takes a free one, on one node.
        run_id: name of the job.
        max_restarts: how often each rank is started again.
        faults: faults of ranks as texts, see bml.cluster.torchrun.strikes.
        grace_s: seconds between SIGTERM and SIGKILL when the job is interrupted.
    """

    command: Sequence[str]
    n_ranks: int
    n_nodes: int = 1
    node: int | None = 0
    endpoint: tuple[str, int] = ("127.0.0.1", 0)
    run_id: str = "none"
    max_restarts: int = 0
    faults: Sequence[str] = ()
    grace_s: float = 30.0


@dataclass(frozen=True)
class Outcome:
    """How the ranks of this node ended: the exit status, a line (may be empty), and the end of each."""

    status: int
    line: str
    summary: dict[str, Any]


def run(request: Request, show: Show, say: Callable[[str], None]) -> Outcome:
    """Run the ranks of this node and return when all have ended, and no other node needs the store.

    `show` is given the ranks' output, `say` the launcher's own lines. When an exception interrupts it, such
    as KeyboardInterrupt, the ranks get SIGTERM, and SIGKILL after the grace; nothing is left.

    Raises UsageError for faults or an address that cannot be, StartError if the ranks cannot be started.
    """
    if request.n_nodes == 1:
        strikes_of(request.faults, request.n_ranks)  # before anything is started
    with ExitStack() as stack:
        launcher = _Launcher(request, show, say, stack)
        if threading.current_thread() is threading.main_thread():
            launcher.pass_on_signals(stack)
        try:
            launcher.meet()
            launcher.follow()
        except BaseException:
            launcher.interrupt()
            raise
        return launcher.leave()


class _Launcher:
    def __init__(self, request: Request, show: Show, say: Callable[[str], None], stack: ExitStack):
        self._request, self._show, self._say = request, show, say
        host, port = request.endpoint
        listening = listen(host, port, request.node, request.n_nodes)
        if listening is not None:
            port = listening.getsockname()[1]
        self._master = (host, port)
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._store: Helper | None = self._start_store(listening)
        stack.callback(self._store.kill)
        self._met = False
        self._agent = start_agent({**LONG_COPIES, **os.environ}, request.command)
        stack.callback(self._agent.hang_up)
        stack.callback(self._close_pipes)
        for helper in (self._store, self._agent):
            self._selector.register(helper.sock, selectors.EVENT_READ)
        self._pipes: dict[int, list[Pipe]] = {}
        """Of the running process of each rank."""
        self._layout: Layout
        self._ranks: Ranks
        self._strikes: Strikes
        self._threads: int | None = None
        # The ranks of other nodes must have the same, and this launcher has no way to tell it to them alone.
        own = request.n_nodes == 1 and not os.environ.get(SECRET)
        self._secret = {SECRET: secrets.token_hex(32)} if own else {}
        self._began = 0.0

    def _start_store(self, listening: socket.socket | None) -> Helper:
        request, (host, port) = self._request, self._master
        number = None if listening is None else listening.fileno()
        try:
            return start_store(
                Wanted(host, port, number, request.node, request.n_nodes, request.n_ranks, request.run_id)
            )
        finally:
            if listening is not None:
                listening.close()

    def pass_on_signals(self, stack: ExitStack) -> None:
        """Let the ranks have the signals that are meant for them; only the main thread may ask for it."""
        self._told, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, self._told)
        stack.callback(os.close, tell)

        def note(number: int, _: object) -> None:
            with suppress(BlockingIOError):  # so many wait already
                os.write(tell, bytes([number]))

        for number in _FOR_RANKS:
            stack.callback(signal.signal, number, signal.signal(number, note))
        self._selector.register(self._told, selectors.EVENT_READ, self._tell)

    def _tell(self) -> None:
        for number in dict.fromkeys(os.read(self._told, 4096)):
            self._agent.send({"do": "tell", "number": number})

    # --- start -----------------------------------------------------------------------------------

    def meet(self) -> None:
        """Wait for the other nodes, and start the ranks. With one node they start at once."""
        request = self._request
        sizes, node = [request.n_ranks], 0
        if request.n_nodes > 1:
            while (message := self._heard_of_store()) is None or message["is"] != "met":
                pass
            sizes, node = message["sizes"], message["node"]
        self._layout = Layout(tuple(sizes), node, request.run_id, self._master, request.max_restarts)
        strikes = strikes_of(request.faults, self._layout.world_size)
        self._strikes = Strikes(strikes, self._layout.ranks)
        self._ranks = Ranks(self._layout.ranks, request.max_restarts)
        n_cores = len(os.sched_getaffinity(0))
        self._threads = threads_of(n_cores, request.n_ranks, os.environ)
        if self._threads is not None:
            self._say(
                f"{THREADS} is {self._threads} in each rank: {n_cores} cores for {request.n_ranks} ranks; "
                "set it to change that"
            )
        self._began = time.monotonic()
        for rank in self._layout.ranks:
            self._start(rank)

    def _start(self, rank: int) -> None:
        pipes = [Pipe(rank, number, self._show) for number in (1, 2)]
        environment = self._layout.environment(rank, self._ranks.restarts(rank), self._threads) | self._secret
        self._agent.send(
            {"do": "start", "name": rank, "environment": environment},
            [pipe.writes for pipe in pipes],
        )
        self._pipes[rank] = pipes
        for pipe in pipes:
            pipe.given()
            self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)

    # --- while they run --------------------------------------------------------------------------

    def follow(self) -> None:
        """Show the ranks' output, start dead ones again and let faults strike, until all have ended."""
        while running := self._ranks.running:
            now_s = time.monotonic() - self._began
            for strike in self._strikes.due(now_s, running):
                self._say(f"the fault {strike.fault} {'ends' if strike.act == 'thaw' else 'strikes'}")
                self._signal(strike.rank, _SIGNALS[strike.act])
            for rank in self._strikes.for_good(running):
                self._say(f"all others have ended: rank {rank}, which is frozen for good, is killed")
                self._strikes.ended(rank)
                self._signal(rank, signal.SIGKILL)
            self._look(self._strikes.wait_s(now_s))

    def _signal(self, rank: int, number: int) -> None:
        self._agent.send({"do": "signal", "names": [rank], "number": number})

    def _look(self, within_s: float | None) -> None:
        """Wait for output and messages, and handle them."""
        for key, _ in self._selector.select(within_s):
            if isinstance(key.data, Pipe):
                if self._is_open(key.data) and not key.data.read():
                    self._close(key.data)
            elif key.data == self._tell:
                self._tell()
            elif self._store is not None and key.fileobj is self._store.sock:
                self._heard_of_store()
            else:
                self._heard_of_agent()

    def _heard_of_agent(self) -> None:
        message = self._agent.receive()
        if message is None:
            self._ranks.stop()
            raise FabricError("the process that is the parent of the ranks was killed, and they with it")
        if message["is"] == "told":
            self._say(_told(signal.Signals(message["number"]).name, message["names"]))
            return
        rank = message["name"]
        if message["is"] == "cannot":
            self._not_started(rank, message["why"])
        elif message["is"] == "ended":
            self._ended(rank, message["code"])

    def _not_started(self, rank: int, why: str) -> None:
        """A rank cannot be started; raises StartError if it is for the first time."""
        if not self._ranks.restarts(rank):
            raise StartError(f"{self._request.command[0]} cannot be run: {why}")
        self._drain(rank)
        code = self._ranks.not_started(rank)
        self._say(f"rank {rank}, which {how(code)}, cannot be started again: {why}")

    def _drain(self, rank: int) -> None:
        for pipe in self._pipes[rank]:
            if self._is_open(pipe) and not pipe.drain():
                self._close(pipe)

    def _ended(self, rank: int, code: int) -> None:
        self._drain(rank)
        self._strikes.ended(rank)
        if self._ranks.ended(rank, code):
            count = f"{self._ranks.restarts(rank)} of {self._request.max_restarts}"
            self._say(f"rank {rank} {how(code)}, and is started again ({count})")
            self._start(rank)
        elif code and self._ranks.running:
            self._say(f"rank {rank} {how(code)}, and is not started again")

    def _is_open(self, pipe: Pipe) -> bool:
        """Whether a pipe was not closed; its number may be that of another meanwhile."""
        key = self._selector.get_map().get(pipe.descriptor)
        return key is not None and key.data is pipe

    def _close_pipes(self) -> None:
        """Close the pipes to which processes can write that have left the process groups of the ranks."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Pipe):
                self._close(key.data)

    def _close(self, pipe: Pipe) -> None:
        self._selector.unregister(pipe.descriptor)
        pipe.close()

    def _heard_of_store(self) -> dict[str, Any] | None:
        """Take a message of the process that holds the store, and return it."""
        assert self._store is not None
        message = self._store.receive()
        match message:
            case {"is": "over"}:
                self._drop_store()
            case None:
                self._without_store("the process that holds the store was killed")
            case {"is": "failed", "why": why}:
                self._without_store(f"the store cannot be used: {why}")
            case {"is": "lost"}:
                self._without_store("node 0, which holds the store, is gone")
            case {"is": "met"}:
                self._met = True
            case {"is": "waits", "nodes": nodes}:
                self._say(f"waiting for node {', '.join(map(str, nodes))}")
            case {"is": "gone", "nodes": nodes}:
                self._say(f"node {', '.join(map(str, nodes))} ended without a word")
        return message

    def _without_store(self, why: str) -> None:
        """Raises StartError if there never was a store; later no rank can be started again."""
        self._drop_store()
        if not self._met:
            raise StartError(why)
        self._ranks.stop()
        self._say(f"{why}: the ranks go on, and none can be started again" if self._ranks.running else why)

    def _drop_store(self) -> None:
        """Listen no more to the process that holds the store."""
        assert self._store is not None
        self._selector.unregister(self._store.sock)
        self._store = None

    # --- the end ---------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Ask the ranks to end, and kill them after the grace; shows their last words."""
        if not self._pipes:
            return
        self._ranks.stop()
        self._agent.send({"do": "end", "grace_s": self._request.grace_s})
        while self._ranks.running:
            try:
                self._look(None)
            except FabricError:  # the agent is gone: everything has ended
                self._last_words()
                return

    def _last_words(self) -> None:
        """Show what is left in the pipes, to their ends; processes that outlive the ranks may hold them."""
        deadline = time.monotonic() + _LAST_WORDS_S
        with selectors.DefaultSelector() as left:
            for key in self._selector.get_map().values():
                if isinstance(key.data, Pipe):
                    left.register(key.fd, selectors.EVENT_READ, key.data)
            while left.get_map() and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in left.select(left_s):
                    if not key.data.read():
                        left.unregister(key.fd)
                        self._close(key.data)

    def leave(self) -> Outcome:
        """Let the store go when no other node needs it, and return how the ranks ended."""
        if self._request.n_nodes > 1 and self._store is not None:
            with suppress(OSError):
                self._store.sock.send(b"done")
            # Node 0 notices by itself which others are gone; the machine of node 0 may be off.
            deadline = float("inf") if self._layout.node == 0 else time.monotonic() + GONE_S
            while self._store is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._without_store("node 0, which holds the store, does not answer")
                else:
                    self._look(left_s if self._layout.node else None)
        summary = {
            "exit_status": self._ranks.status(),
            "run_id": self._layout.run_id,
            "node_rank": self._layout.node,
            "world_size": self._layout.world_size,
            "ranks": self._ranks.summary(),
            "never_struck": self._strikes.rest(),
        }
        return Outcome(self._ranks.status(), self._ranks.line(), summary)


def _told(name: str, ranks: Sequence[int]) -> str:
    if not ranks:
        return f"{name} is for ranks, and none has a handler for it: nothing is done"
    return f"{name} is passed on to rank {', '.join(map(str, ranks))}"
