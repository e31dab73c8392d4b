"""A rank's thread that looks after the coordinator of its group, as `CoordinatorElection` decides."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from bml.cluster.formation import coordinator_process
from bml.cluster.formation.entries import Entries
from bml.cluster.server.server import Server
from bml.cluster.spec.job import Contact, Contacts, JobSpec
from bml.io.interruptible import Event
from bml.protocol.coordinator.election import CoordinatorElection, GiveUp, Order, Prepare, Probe, Start

_LOG = logging.getLogger(__name__)

#: How often the store is asked for joiners, in seconds.
_JOINERS_EVERY_S = 0.2
_REOPEN_EVERY_S = 1.0  # how often a store that failed is tried again: it may be gone for good
_PROBE_S = 1.0
"""How long a connection to another rank may take that shows whether it is there, in seconds."""
#: How long a coordinator of this rank may take to tell the others of the end, in seconds.
_LAST_WORDS_S = 3.0


class Monitor:
    """Prepares processes for the coordinator of one group, and starts coordinators in them.

    `look` is the callback of the server for news of its line; `open_entries` returns the entries of the group
    in its store, for a thread of its own, or None if joiners are not let in.
    """

    def __init__(
        self, spec: JobSpec, election: CoordinatorElection, open_entries: Callable[[], Entries | None]
    ):
        self._spec = spec
        self._group = spec.job
        self._election = election
        self._open_entries = open_entries
        self._events: queue.SimpleQueue[coordinator_process.Event] = queue.SimpleQueue()
        self._news = Event()
        self._process: coordinator_process.CoordinatorProcess | None = None
        self._watch: JoinWatch | None = None
        self._joiners: dict[int, tuple[int, Contact]] = {}
        """The newest incarnation of each rank that the store has named, and where it is reached."""
        self._closing_at: float | None = None
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Have the thread look at once; any thread may call it."""
        self._news.set()

    def prepare(self) -> None:
        """Start the process for coordinators now: it imports while the group is formed."""
        self._carry_out(Prepare(), None)

    def start(self, server: Server) -> None:
        """Begin to look after the coordinator."""
        self._thread = threading.Thread(target=self._run, args=(server,), name="bml-monitor", daemon=True)
        self._thread.start()

    @property
    def process(self) -> int | None:
        """The id of the process for coordinators; None if this rank has none."""
        return None if self._process is None else self._process.number

    @property
    def leads(self) -> bool:
        """Whether this rank runs the coordinator, as far as it knows."""
        return self._election.leads

    def close(self, waits: bool) -> None:
        """End the thread and, with the last group, the process; the server must not run any more.

        With `waits` a coordinator of this rank may tell the others of the end first.
        """
        self._closing_at = time.monotonic() + (_LAST_WORDS_S if waits else 0.0)
        self._news.set()
        if self._thread is not None:
            self._thread.join()
        if self._watch is not None:
            self._watch.close()
        if self._process is not None:
            coordinator_process.release(self._group, self._process)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self, server: Server) -> None:
        while True:
            self._news.clear()  # news that come from here on end the wait below
            now = time.monotonic()
            self._take_events(now)
            if self._is_over(now):
                return
            due = now + _LAST_WORDS_S
            if not server.is_over:
                self._look(server, now)
                due = self._election.next_deadline(now)
            if self._closing_at is not None:
                due = min(due, self._closing_at)
            self._news.wait(max(0.0, due - time.monotonic()))

    def _is_over(self, now: float) -> bool:
        return self._closing_at is not None and (not self._election.own_term or now >= self._closing_at)

    def _look(self, server: Server, now: float) -> None:
        self._election.saw(server.membership().seen, now)
        while (order := self._election.look(now)) is not None:
            self._carry_out(order, server)
        watches = self.leads or self._election.is_outside
        if not watches and self._watch is not None:
            self._watch.close()
            self._watch = None
        elif watches and self._watch is None:
            try:
                self._watch = JoinWatch(self._open_entries, self._joins)
            except RuntimeError as error:  # tried again: a thread may start later
                _LOG.warning("the store of the group cannot be asked for joiners: %s", error)

    def _take_events(self, now: float) -> None:
        while not self._events.empty():
            match self._events.get():
                case ("ready",):
                    self._election.ready()
                case ("ended", term, deposed_by):
                    self._election.ended(term, now, deposed_by)
                case ("lost",):
                    self._lost(now)

    def _lost(self, now: float) -> None:
        _LOG.info("the process for coordinators of group %s is gone", self._group)
        lost, self._process = self._process, None
        if lost is not None:
            coordinator_process.release(self._group, lost)
        self._election.lost(now)

    def _carry_out(self, order: Order, server: Server | None) -> None:
        match order:
            case Prepare():
                try:
                    self._process = coordinator_process.of_this_process(self._group, self._heard)
                except (OSError, RuntimeError) as error:  # no thread can start at the end of a process
                    _LOG.warning("no process for coordinators could be started: %s", error)
                    self._election.lost(time.monotonic())
            case Probe():
                assert server is not None
                self._election.probed(self._is_anybody_there(server), time.monotonic())
            case GiveUp():
                assert server is not None
                server.let_go()
            case Start(term):
                assert self._process is not None
                assert server is not None
                found = server.membership()
                if self._watch is not None:  # another coordinator must be told of all joiners
                    self._watch.close()
                    self._watch = None
                self._process.send("start", self._group, self._spec, found.contacts, found.incarnations, term)

    def _heard(self, event: coordinator_process.Event) -> None:
        self._events.put(event)
        self._news.set()

    def _joins(self, server: int, incarnation: int, contact: Contact) -> None:
        if incarnation > self._joiners.get(server, (0,))[0]:
            self._joiners[server] = incarnation, contact
        process = self._process
        if process is not None and self.leads:
            process.send("join", self._group, server, incarnation, contact)

    def _is_anybody_there(self, server: Server) -> bool:
        """Whether any other rank may be there: its machine does not say that its process is gone.

        All ranks may have been started again since this one read the store.
        """
        newest = {rank: contact for rank, (_, contact) in self._joiners.copy().items()}
        return _anybody(server.server, server.membership().contacts | newest)


def _anybody(own: int, contacts: Contacts) -> bool:
    for rank, contact in contacts.items():
        if rank == own:
            continue
        try:
            socket.create_connection(contact.control, _PROBE_S).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            return True
        return True
    return False


class JoinWatch:
    """A thread that asks the store for joiners: this rank tells them to its coordinator, or waits for others.

    After an error of the store it tries again: the store may be gone with the rank that had it, or come back.
    """

    def __init__(
        self, open_entries: Callable[[], Entries | None], joins: Callable[[int, int, Contact], None]
    ):
        self._joins = joins
        self._ended = Event()
        self._thread = threading.Thread(
            target=self._run, args=(open_entries,), name="bml-joiners", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End it; a call of the store that hangs is not waited for."""
        self._ended.set()
        self._thread.join(_JOINERS_EVERY_S)

    def _run(self, open_entries: Callable[[], Entries | None]) -> None:
        known, entries, said = set[int](), None, False
        while not self._ended.is_set():
            try:
                entries = entries or open_entries()
                if entries is None:
                    return
                for incarnation, contact in entries.joined(known):
                    known.add(incarnation)
                    self._joins(contact.server, incarnation, contact)
                self._ended.wait(_JOINERS_EVERY_S)
            except Exception as error:  # each store has errors of its own
                entries = None
                if not said:
                    _LOG.info("the store of the group cannot be asked for joiners, tried again: %s", error)
                said = True
                self._ended.wait(_REOPEN_EVERY_S)
