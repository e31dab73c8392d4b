"""What a training script asks of a group that may have lost ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from bml.topology.errors import UsageError
from bml.torch.process_group import ProcessGroup


def contributors(group: Any = None) -> tuple[int, ...]:
    """The ranks in `group` (None: the default group) whose parts are in its last result; at first all.

    All ranks that are left see the same after the same collective. Raises UsageError for a group of another
    backend.
    """
    return _ours(group).contributors


def is_writer(group: Any = None) -> bool:
    """Whether this rank is the lowest whose part is in the last result of `group` (None: the default one).

    After the same collective exactly one rank is: let it write snapshots, as rank 0 may be lost. A rank that
    joins is not before it is among the others. Raises UsageError for a group of another backend.
    """
    ours = _ours(group)
    return bool(ours.rank() == min(ours.contributors)) and not ours.is_alone


def _ours(group: Any) -> ProcessGroup:
    if group is None:
        if not dist.is_initialized():
            raise UsageError(
                'there is no process group: call torch.distributed.init_process_group("bml") before'
            )
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise UsageError("the group is not one of the backend bml")
    return group
