"""Registers the backend "bml" with torch.distributed, and makes its process groups.

PyTorch 2.14 and newer calls `register` itself, by the entry point `torch.distributed.backends`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from bml.topology.errors import UsageError

if TYPE_CHECKING:
    from bml.torch.process_group import ProcessGroup

NAME = "bml"


def register() -> None:
    """Make `torch.distributed.init_process_group("bml")` known. Idempotent."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def create(given: Any, options: Any) -> ProcessGroup:
    """Form a group of processes that have a store in common; torch.distributed calls it.

    `given` has the store, this rank, the number of ranks and the time-out. Returns a group once all ranks are
    there, or with `enable_reconfigure` at once, one that is formed later. Raises StartError if a rank does
    not appear in time, UsageError if one is known to be lost.
    """
    from bml.cluster.formation.group import close_all, form
    from bml.cluster.formation.settings import Settings
    from bml.torch.process_group import ProcessGroup
    from bml.torch.reconfigurable import ReconfigurableGroup

    rank, size, timeout = given.group_rank, given.group_size, given.timeout
    if getattr(given, "enable_reconfigure", False):  # not in PyTorch before 2.14
        return ReconfigurableGroup(rank, size, given.store, timeout)
    _check_members(given.global_ranks_in_group)
    start_s = seconds_to_appear(timeout, Settings.start_s)
    is_default = dist.GroupMember.WORLD is None
    # PyTorch may give groups of other ranks the same prefix: it numbers those that a rank has made.
    store = dist.PrefixStore("ranks " + " ".join(map(str, given.global_ranks_in_group)), given.store)
    group = form(store, rank, size, Settings(start_s=start_s))

    def end(in_order: bool) -> None:
        if is_default:
            close_all("done" if in_order else "crashed")
        else:
            group.begin_close("done" if in_order else "crashed")

    return ProcessGroup(*(group.server, rank, size, given.store, timeout), on_shutdown=end, messenger=group)


def seconds_to_appear(timeout: timedelta, otherwise: float) -> float:
    """How long ranks may take to appear: the time-out that the program gave, and `otherwise` without one.

    PyTorch's own of half an hour, which is there without one, is that for which a live rank is waited.
    """
    return otherwise if timeout == default_pg_timeout else timeout.total_seconds()


def _check_members(ranks: list[int]) -> None:
    """Raise UsageError if one of these ranks is lost in the default group. For that group there are none."""
    from bml.torch.process_group import ProcessGroup
    from bml.torch.reconfigurable import ReconfigurableGroup

    default = dist.group.WORLD
    if isinstance(default, ReconfigurableGroup):
        raise UsageError(
            "new_group in a program with enable_reconfigure: its groups are formed by _reconfigure alone"
        )
    if isinstance(default, ProcessGroup):
        lost = [rank for rank in ranks if rank not in default.contributors]
        if lost:
            raise UsageError(
                f"new_group with ranks {ranks}, of which {lost} are lost: give ranks out of "
                f"{default.contributors} (see bml.torch.contributors)"
            )
