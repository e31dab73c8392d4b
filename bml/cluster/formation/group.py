"""A group of ranks that other programs started, as one of them sees it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing import util
from typing import Literal, NamedTuple

from bml.cluster.formation import program_end
from bml.cluster.formation.entries import Entries, Joined, Store
from bml.cluster.formation.exchange import Exchange
from bml.cluster.formation.host import this_host
from bml.cluster.formation.monitor import Monitor
from bml.cluster.formation.point_to_point import ANY
from bml.cluster.formation.secret import Secret
from bml.cluster.formation.settings import Host, Settings, job_of, nics_of
from bml.cluster.server.server import Server
from bml.cluster.spec.job import Contact, JobSpec
from bml.errors import StartError, UsageError
from bml.io.interruptible import refuse_green_threads
from bml.protocol.coordinator.election import CoordinatorElection
from bml.protocol.step.workspace import Array

Outcome = Literal["done", "crashed"]

_SPARES = 2
"""The lowest ranks, which prepare a process for a coordinator while the group is formed."""
_SWITCH_S = 0.0001
"""See bml.cluster.process.training."""
_ENDS_FIRST = 100
"""The priority of closing among what a process does at its end: before its children are waited for."""


class Parts(NamedTuple):
    """What a rank has beside its server."""

    monitor: Monitor
    exchange: Exchange


_open: set[Group] = set()
"""The groups of this process that are not closed."""
_formed: set[str] = set()
"""The jobs in which this process was."""


class Group:
    """A group that was formed. `server` is this rank's: a Communicator for bml.train.Session.

    `rank` is its number among `size`; `incarnation` is 0 for a rank that was there from the beginning, else
    the number of the joiner. The group is closed at the end of the process, if `close` was not called before.
    """

    def __init__(self, server: Server, parts: Parts, size: int, incarnation: int):
        self.server = server
        self.rank = server.server
        self.size = size
        self.incarnation = incarnation
        self._monitor, self._exchange = parts
        self._process = os.getpid()
        self._closing: threading.Thread | None = None
        _open.add(self)
        # In a child of multiprocessing, too, where no handlers of atexit run.
        self._at_end = util.Finalize(None, _end_of_process, exitpriority=_ENDS_FIRST)

    @property
    def coordinator_process(self) -> int | None:
        """The id of the process beside this one in which its coordinators run; None if it has none."""
        return self._monitor.process

    @property
    def leads(self) -> bool:
        """Whether the group's coordinator is that of this rank, as far as this rank knows."""
        return self._monitor.leads

    # --- messages between two ranks --------------------------------------------------------------

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send the bytes of a contiguous array to another rank; returns when all of them are there.

        Raises ContributorLost if that rank is lost, UsageError for a rank or an array that cannot be, and the
        error that ended the group.
        """
        self.begin_send(array, to, tag).result()

    def recv(self, array: Array, source: int = ANY, tag: int = 0) -> int:
        """Receive a message with this tag of a rank, or of any, into a contiguous array; returns the rank.

        Messages of one rank with one tag come in the order in which they were sent. Raises UsageError if
        the message has another length than the array, and the errors of `send`.
        """
        return self.begin_recv(array, source, tag).result()

    def begin_send(self, array: Array, to: int, tag: int = 0) -> Future[int]:
        """The same without waiting: the array must not change until the future is done."""
        return self._exchange.send(array, to, tag)

    def begin_recv(self, array: Array, source: int = ANY, tag: int = 0) -> Future[int]:
        """The same without waiting: the array is not filled until the future is done."""
        return self._exchange.receive(array, source, tag)

    # --- the end ---------------------------------------------------------------------------------

    def close(self, outcome: Outcome = "done") -> None:
        """End this rank's part, and leave nothing behind. Idempotent; without effect in a forked process.

        With "done" it serves the others until all are done, which may take as long as they compute. With
        "crashed" it leaves at once, and the others go on without it. Raises UsageError for another outcome.
        """
        if outcome not in ("done", "crashed"):
            raise UsageError(f"outcome is {outcome!r}: give done or crashed")
        self.begin_close(outcome)
        if self._closing is not None:
            self._closing.join()

    def begin_close(self, outcome: Outcome = "done") -> None:
        """The same without waiting: the others learn of the end, and a thread does the rest of `close`.

        Where a process ends several groups, ranks that end them in other orders do not wait for each other.
        """
        if self._closing is not None or os.getpid() != self._process:
            return
        if outcome == "done":
            self.server.begin_end("done")
        self._closing = threading.Thread(target=self._close, args=(outcome,), name="bml-closing", daemon=True)
        self._closing.start()

    def _close(self, outcome: Outcome) -> None:
        try:
            if outcome == "done":
                self.server.wait_for_end()
            else:
                self.server.depart("its program ended with an error")
        finally:
            self._exchange.close()
            self._monitor.close(waits=outcome == "done")
            self._at_end.cancel()
            _open.discard(self)


def close_all(outcome: Outcome = "done") -> None:
    """Close all groups of this process, as `Group.close` does."""
    groups = list(_open)
    for each in groups:
        each.begin_close(outcome)
    for each in groups:
        each.close(outcome)


def _end_of_process() -> None:
    """Close groups that the program did not close: if an error ended the program, it has crashed."""
    close_all("crashed" if program_end.has_failed() else "done")


def form(store: Store, rank: int, size: int, settings: Settings | None = None) -> Group:
    """Form a group of `size` processes that reach one `store`; this one is `rank`, counted from 0.

    Returns when the first view is in force. A process that has the number of a rank that was there before
    joins the group: it returns at once, and is let in when it comes to its first boundary.

    Raises StartError if not all ranks appear within `start_s`, with the missing ranks, and if the group lets
    no rank in again. Raises UsageError for a rank, size or settings that cannot be, and where gevent or
    eventlet has replaced threads; FabricError if this machine cannot open what the group needs.
    """
    refuse_green_threads()
    settings = settings or Settings()
    if not 0 <= rank < size:
        raise UsageError(f"rank is {rank}: give 0 to {size - 1}, as there are {size} ranks")
    deadline = time.monotonic() + settings.start_s
    entries, secret = Entries(store, size, deadline), Secret(os.environ)
    joins = entries.has_contact(rank)
    spec = entries.job() if joins else _agreed(entries, rank, settings, secret)
    secret.check(entries.mark(), spec)
    spec = secret.mixed_into(spec)
    if joins and not spec.rejoin:
        raise StartError(
            f"rank {rank} was in this group before, and no rank is let in again: rank 0 formed it with "
            "rejoin=False"
        )
    if spec.job in _formed:
        raise UsageError(
            "this process was in that group before, and a group is formed once: give another store, or "
            "another prefix in it"
        )
    _formed.add(spec.job)
    incarnation = entries.next_incarnation() if joins else None
    hosts = entries.hosts()
    machines = [host.identity for host in hosts]
    election = CoordinatorElection(rank, size, spec.timeouts(), time.monotonic(), joins, machines)
    monitor = Monitor(spec, election, partial(_own_entries, store, size) if spec.rejoin else _no_entries)
    parts = Parts(monitor, Exchange(rank, size))
    if not joins and rank < _SPARES:
        monitor.prepare()
    program_end.watch()
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
    try:
        server = _server(entries, spec, rank, incarnation, hosts, parts)
    except BaseException:
        monitor.close(waits=False)
        raise
    monitor.start(server)
    group = Group(server, parts, size, incarnation or 0)
    if not joins:
        try:
            server.wait_for_view()
        except BaseException:
            group.close("crashed")
            raise
    return group


def _agreed(entries: Entries, rank: int, settings: Settings, secret: Secret) -> JobSpec:
    """Meet the other ranks of the first formation; returns the job that rank 0 makes."""
    entries.came(rank, this_host(settings.host))
    if rank == 0 and not entries.has_job:
        spec = job_of(settings, entries.hosts())
        entries.put_job(spec, secret.mark(spec))
    return entries.job()


def _server(
    entries: Entries,
    spec: JobSpec,
    rank: int,
    incarnation: int | None,
    hosts: Sequence[Host],
    parts: Parts,
) -> Server:
    """Make this rank's server, exchange addresses, and start it."""
    here = None if len({host.identity for host in hosts}) == 1 else hosts[rank].address
    nics = nics_of(rank, spec.parsed_fabric().levels, here, os.environ)
    host, on_line = here or "127.0.0.1", parts.monitor.look
    server = Server(spec, rank, nics, host, incarnation=incarnation, on_line=on_line)
    parts.exchange.open(server)
    try:
        server.start(_exchanged(entries, server.contact, incarnation))
    except BaseException:
        server.discard()
        raise
    return server


def _exchanged(entries: Entries, own: Contact, incarnation: int | None) -> dict[int, Contact]:
    """Say where this rank is reached, and return the addresses of all."""
    if incarnation is None:
        entries.put_contact(own)
        return entries.contacts()
    entries.put_join(Joined(incarnation, own))
    return entries.contacts() | {each.contact.server: each.contact for each in entries.joined()}


def _own_entries(store: Store, size: int) -> Entries:
    """The entries of the group over a connection of its own, if the store has such."""
    clone = getattr(store, "clone", None)
    return Entries(store if clone is None else clone(), size, 0.0)


def _no_entries() -> None:
    """No joiners are looked for."""


__all__ = ["Group", "Outcome", "Settings", "StartError", "form"]
