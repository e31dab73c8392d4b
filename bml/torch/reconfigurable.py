"""PyTorch's own interface for fault tolerance: a program outside decides which processes make a group.

PyTorch 2.14 and newer calls it after `init_process_group("bml", enable_reconfigure=True)`. Each `reconfigure`
forms a group anew; in between it outlives lost ranks as any group of bml does.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

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
        over. It fails with StartError if not all of them appear within `options.timeout`: this process is in
        no group then, and may be put into another one. Raises RuntimeError for a uuid that was used,
        UsageError for handles that cannot be.
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
        store = dist.PrefixStore(f"reconfigured/{uuid}", self._store_of(found.first, settings.start_s))
        group = form(store, found.rank, found.size, settings)
        with self._changing:
            is_wanted = formation == self._formation
            if is_wanted:
                self._messages = Messages(group, found.rank, self._limit_s)
                self._on_shutdown = partial(_leave, group)
                self._steps = GroupSteps(group.server, found.rank, found.size)
        if not is_wanted:
            group.begin_close("crashed")
            raise StartError("the group was left before it was formed")
        return -1

    def _store_of(self, first: Handle, within_s: float) -> Any:
        if first == self._handle:
            return self._meeting
        try:
            return dist.TCPStore(first.host, first.port, timeout=timedelta(seconds=within_s))
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
