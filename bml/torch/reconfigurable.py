"""PyTorch's own interface for fault tolerance: a program outside decides which processes make a group.

PyTorch 2.14 and newer calls it after `init_process_group("bml", enable_reconfigure=True)`. Each `reconfigure`
forms a group anew; in between it outlives lost ranks as any group of bml does.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from bml.cluster.formation.entries import names
from bml.cluster.formation.group import Group, close_all, form
from bml.cluster.formation.host import this_host
from bml.cluster.formation.settings import Settings
from bml.errors import StartError
from bml.topology.errors import UsageError
from bml.torch.handles import Handle, Place, Uses, check_nics, fabric_of, new_handle, place
from bml.torch.messages import Messages
from bml.torch.process_group import DEFAULT_TIMEOUT, ProcessGroup
from bml.torch.steps import GroupSteps
from bml.torch.work import GroupWork, WorkThread

_GROUPS, _MEMBERS, _DIFFER = "reconfigured", "members", "differ"
"""Keys of a group in the store of its rank 0: the prefix, the digest of its handles, that it has two."""
_LOOK_S = 0.02
"""How often a process that waits for the others looks into the store, in seconds."""


class NotFormed(StartError, RuntimeError):
    """A group was not formed: PyTorch's own groups raise RuntimeError."""


class MeetingStore:
    """The store of a group, in which waits end when its processes were given different handles.

    Methods are those of bml.cluster.formation.entries.Store; they raise NotFormed then.
    """

    def __init__(self, store: Any, digest: str):
        self._store = store
        self.set, self.get, self.add = store.set, store.get, store.add
        if store.compare_set(_MEMBERS, "", digest) != digest.encode():
            store.set(_DIFFER, "")

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""
        if self._store.check([_DIFFER]):
            raise NotFormed(
                "the processes were given different handles for this uuid: give all of them the same ones, "
                "in the same order"
            )
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys have values; raises TimeoutError if that takes too long."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(_LOOK_S)


class ReconfigurableGroup(ProcessGroup):
    """One process's part in groups that are formed of handles; see ProcessGroup for its collectives.

    `rank` and `size` are those of the last `reconfigure`, at first the given ones. `timeout` limits waits for
    collectives. Until a group is formed, and after `abort`, collectives raise UsageError.
    """

    supports_reconfigure = True

    def __init__(self, rank: int, size: int, store: Any = None, timeout: timedelta = DEFAULT_TIMEOUT):
        self._formed: GroupSteps | None = None
        self._rank, self._size = rank, size
        self._uses = Uses()
        self._formation = 0
        self._old_keys: list[str] = []
        self._changing = threading.Lock()
        check_nics(os.environ)
        host = this_host(None).address
        self._meeting = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._handle = new_handle(host, self._meeting.port)
        super().__init__(None, rank, size, store, timeout)

    # --- what PyTorch asks of it -------------------------------------------------------------------

    def rank(self) -> int:
        """Its rank in the last group."""
        return self._rank

    def size(self) -> int:
        """How many ranks the last group has."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815  # PyTorch calls these in C++

    def get_reconfigure_handle(self) -> str:
        """The handle of this process, the same as long as it lives."""
        return self._handle.encode()

    def reconfigure(self, options: Any) -> GroupWork:
        """Leave the last group, and form one of the processes whose handles are in `options`.

        A list of handles gives the ranks by position; a set leaves them to the backend. `options.uuid` is
        the same in all these processes, and new to each. Returns a work; the group can be used when it is
        over. It fails with an error that is a StartError and a RuntimeError if not all of them appear within
        `options.timeout`, and at once if rank 0 has ended or if they were given different handles: this
        process is in no group then, and may be put into another one. Raises RuntimeError for a uuid that was
        used, UsageError for handles that cannot be.
        """
        found = place(self._handle, options.handles)
        self._uses.use(options.uuid)
        limit = options.timeout
        start_s = Settings.start_s if limit is None else limit.total_seconds()
        settings = Settings(fabric_of(found.size, os.environ), start_s=start_s, rejoin=False)
        self.abort()
        self._rank, self._size = found.rank, found.size
        self._thread = WorkThread(f"bml-group-{found.rank}")
        work = GroupWork("reconfigure", [], start_s + self._limit_s)
        return self._thread.begin(partial(self._form, self._formation, found, options.uuid, settings), work)

    # --- forming and leaving -----------------------------------------------------------------------

    def _form(self, formation: int, found: Place, uuid: int, settings: Settings) -> int:
        try:
            group = self._formed_of(found, f"{_GROUPS}/{uuid}", settings)
        except StartError as error:
            raise NotFormed(str(error)) from error
        with self._changing:
            is_wanted = formation == self._formation
            if is_wanted:
                self._messages = Messages(group, found.rank, self._limit_s)
                self._on_shutdown = partial(_leave, group)
                self._steps = GroupSteps(group.server, found.rank, found.size)
        if not is_wanted:
            group.begin_close("crashed")
            raise NotFormed("the group was left before it was formed")
        return -1

    def _formed_of(self, found: Place, prefix: str, settings: Settings) -> Group:
        for key in self._old_keys:  # those of a group of which this process was rank 0
            self._meeting.delete_key(key)
        self._old_keys = []
        if found.first == self._handle:
            self._old_keys = [f"{prefix}/{key}" for key in (*names(found.size), _MEMBERS, _DIFFER)]
        store = dist.PrefixStore(prefix, self._store_of(found.first, settings.start_s))
        return form(MeetingStore(store, found.digest), found.rank, found.size, settings)

    def _store_of(self, first: Handle, within_s: float) -> Any:
        if first == self._handle:
            return self._meeting
        at, within = (first.host, first.port), timedelta(seconds=within_s)
        try:
            # A process listens there as long as it lives, and PyTorch would dial one that ended again.
            socket.create_connection(at, within_s).close()
            return dist.TCPStore(*at, timeout=within)
        except Exception as error:  # PyTorch has several for this
            raise StartError(
                f"the process of rank 0 does not answer at {first.host}:{first.port}: {error}"
            ) from None

    def _end(self, in_order: bool) -> None:
        with self._changing:
            self._formation += 1
            self._formed = None
        super()._end(in_order)
        self._messages = Messages(None, self._rank, self._limit_s)

    @property
    def _steps(self) -> GroupSteps:
        if self._formed is None:
            raise UsageError(
                "the group is not formed: exchange the handles of its processes, give them to "
                "torch.distributed._reconfigure, and wait for the work that it returns"
            )
        return self._formed

    @_steps.setter
    def _steps(self, steps: GroupSteps) -> None:
        self._formed = steps


def _leave(group: Group, in_order: bool) -> None:
    """Leave a group: in order only when this process's groups are destroyed, which waits for the others."""
    if in_order:
        close_all("done")
    else:
        group.begin_close("crashed")
