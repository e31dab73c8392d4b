"""Watches a Ray cluster for a job: draining nodes give their servers notice, and machines are asked for.

It has a thread of its own: a cluster whose head does not answer delays nothing but this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from bml.cluster.fleets.drains import Drains
from bml.cluster.fleets.fleet import Headless, Patience
from bml.cluster.fleets.placement import Reservation
from bml.cluster.fleets.shortage import Shortage
from bml.cluster.ray.asking import ask_actors
from bml.cluster.ray.machines import CALL_S, draining_nodes, in_cluster, is_client
from bml.io.interruptible import Event

_LOG = logging.getLogger("bml.cluster")

_LOOK_S = 0.25  # a drain is noticed as late; a call to the head's table of nodes
_CLIENT_LOOK_S = 5.0  # each look starts a task on the cluster
#: How long answers of servers are waited for, in seconds.
_ANSWER_S = 1.0
#: How long the end of a job waits until what it asked for is given back, in seconds: a look may be under way.
_ENDING_S = CALL_S + 1.0

Here = Callable[[], Mapping[int, tuple[int, Any]]]
"""Returns the servers that run, each with its incarnation and its actor."""


class ClusterWatch:
    """Looks at the cluster from `start` to `close`; any thread may call its methods.

    Machines are asked for only if servers reserve something: without it, any machine takes any server.
    """

    def __init__(self, reserves: Reservation, here: Here):
        self._reserves, self._here = reserves, here
        self._changing = threading.Lock()
        self._drains, self._shortage = Drains(), Shortage()
        self.draining: frozenset[str] = frozenset()
        """Ray's ids of the nodes that were draining at the last look."""
        self.home = ""
        """Ray's id of the launcher's node."""
        self._end: Headless | None = None
        self._finding: dict[Any, tuple[int, int]] = {}
        self._silent: set[str] = set()
        self._ending = Event()
        self._thread = threading.Thread(target=self._run, name="bml-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def made_leave(self, server: int, incarnation: int) -> bool:
        """Whether this server had notice that its node is draining."""
        with self._changing:
            return self._drains.made_leave(server, incarnation)

    def take_end(self) -> Headless | None:
        """Return the end of the job, once, if the launcher's node was draining at a look. It never waits."""
        end, self._end = self._end, None
        return end

    @contextmanager
    def coming(self, server: int) -> Iterator[None]:
        """Inside, a missing server is started, and may need a machine. If it raises, the start has failed."""
        with self._changing:
            self._shortage.starts(server)
        try:
            yield
        except BaseException:
            with self._changing:
                self._shortage.failed(server, time.monotonic())
            raise
        with self._changing:
            self._shortage.came(server)

    def close(self) -> None:
        """End it, and take back what was asked for; a cluster that does not answer is not waited for."""
        was_asked = self._shortage.is_asked
        self._ending.set()
        if self._thread.ident is None:
            return
        self._thread.join(_ENDING_S)
        if was_asked and self._reserves and (self._thread.is_alive() or self._shortage.is_asked):
            _LOG.warning("this job could not take back the machines that it asked Ray's autoscaler for")

    def _run(self) -> None:
        look_s = _CLIENT_LOOK_S if is_client() else _LOOK_S
        while not self._ending.wait(look_s):
            here = self._here()
            self._try("look for nodes that are draining", partial(self._give_notice, here))
            with self._changing:
                wanted = self._shortage.change(here, time.monotonic())
            self._ask_for(wanted)
        with self._changing:
            wanted = self._shortage.end()
        self._ask_for(wanted)

    def _give_notice(self, here: Mapping[int, tuple[int, Any]]) -> None:
        draining = draining_nodes()
        if self._ending.is_set():  # it may have taken long, and a call of Ray would now start one
            return
        self.draining = frozenset(draining)
        actors = {server: actor for server, (_, actor) in here.items()}
        with self._changing:
            self._drains.seen(draining, {server: incarnation for server, (incarnation, _) in here.items()})
            for server in self._drains.homeless:
                self._find(server, *here[server])
            for (server, incarnation), node in self._found().items():
                self._drains.lives(server, incarnation, node)
            now_ms = time.time() * 1e3
            notices = list(self._drains.notices(now_ms))
            if (end := self._drains.end_of(self.home, now_ms)) is not None:
                self._end = Headless(*end)
        for why in dict.fromkeys(why for _, why in notices):
            told = {server: actors[server] for server, said in notices if said == why}
            heard = ask_actors(told, ("leave", why), Patience(_ANSWER_S))
            with self._changing:
                for server in heard:
                    self._drains.heard(server)

    def _find(self, server: int, incarnation: int, actor: Any) -> None:
        """Ask a server for its node, once, however late it answers."""
        if (server, incarnation) not in self._finding.values():
            self._finding[actor.node.remote()] = server, incarnation

    def _found(self) -> dict[tuple[int, int], str]:
        """Return the nodes of the servers that have answered; one that could not is asked again."""
        if not self._finding:
            return {}
        ready, _ = ray.wait(list(self._finding), num_returns=len(self._finding), timeout=0)
        found: dict[tuple[int, int], str] = {}
        for ref in ready:
            who = self._finding.pop(ref)
            with suppress(RayError):  # it may be on its way out
                found[who] = ray.get(ref)
        return found

    def _ask_for(self, servers: int | None) -> None:
        """Let the cluster have room for so many servers; 0: for none. None: change nothing."""
        if servers is not None and self._reserves:
            bundles = [dict(self._reserves.amounts)] * servers
            if not self._try("ask for machines", lambda: in_cluster(_request, bundles)):
                with self._changing:
                    self._shortage.not_asked()

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        """Do it, and return whether it was done; a cluster that cannot ends no job. It is said once."""
        try:
            action()
        except Exception as error:
            if what not in self._silent and not self._ending.is_set():
                _LOG.warning("this job cannot %s: %s", what, error)
            self._silent.add(what)
            return False
        return True


def _request(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles)
