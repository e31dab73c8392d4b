"""Processes that are put into groups again and again, by a plan that stands for whoever decides outside."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bml.topology.errors import BmlError
from bml.torch.handles import new_handle
from bml.torch.process_group import DEFAULT_TIMEOUT

LIMIT_S = 60.0


def run(folder: str, stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Go through the stages of a plan; returns what this process, a number from 0, saw in each group of it.

    A stage has `groups`, the lists of their processes in the order of ranks, and maybe `unordered`: they give
    sets of handles; `killed`: these processes get SIGKILL before it; `aborts`: all call abort() before it;
    `lost`: this process gets SIGKILL in it, and the others go on in the same group.
    """
    me, there = int(os.environ["RANK"]), Path(folder)
    group = _group(me, int(os.environ["WORLD_SIZE"]))
    (there / f"handle-{me}.new").write_text(group.get_reconfigure_handle())
    (there / f"handle-{me}.new").rename(there / f"handle-{me}")
    seen = []
    for number, stage in enumerate(stages):
        if me in stage.get("killed", []):
            os.kill(os.getpid(), signal.SIGKILL)
        if stage.get("aborts"):
            group.abort()
        mine = [each for each in stage["groups"] if me in each]
        if not mine:
            continue
        ((members,), uuid) = mine, 1000 * number + min(mine[0])
        handles = [_read(there / f"handle-{each}") for each in members]
        _reconfigure(group, uuid, set(handles) if stage.get("unordered") else handles)
        seen.append(_used(group, me))
        if me == stage.get("lost"):
            os.kill(os.getpid(), signal.SIGKILL)
        if stage.get("lost") in members:
            seen.append(_until_lost(group, me))
    refused = _refusals(group, uuid)
    _end(group)
    return [*seen, refused]


def _group(me: int, size: int) -> Any:
    if hasattr(dist, "_reconfigure"):
        import bml.torch  # noqa: F401

        dist.init_process_group("bml", enable_reconfigure=True)
        assert dist._supports_reconfigure()
        return dist.group.WORLD
    from bml.torch.reconfigurable import ReconfigurableGroup

    return ReconfigurableGroup(me, size, None, DEFAULT_TIMEOUT)


def _reconfigure(group: Any, uuid: int, handles: Any, limit_s: float = LIMIT_S) -> None:
    timeout = timedelta(seconds=limit_s)
    if hasattr(dist, "_reconfigure"):
        dist._reconfigure(uuid, handles, timeout=timeout).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (group.rank(), group.size())
    else:
        group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout)).wait()


def _used(group: Any, me: int) -> dict[str, Any]:
    """The sum of a bit for each process, and the process that is rank 0."""
    total, first = torch.tensor([float(1 << me)]), torch.tensor([me])
    group.allreduce([total]).wait()
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([first], options).wait()
    return {"rank": group.rank(), "size": group.size(), "sum": int(total), "first": int(first)}


def _until_lost(group: Any, me: int) -> dict[str, Any]:
    """Go on in the same group until a rank of it is missing."""
    deadline = time.monotonic() + LIMIT_S
    while len(group.contributors) == group.size():
        assert time.monotonic() < deadline, "nobody is lost"
        group.allreduce([torch.ones(1)]).wait()
    total = torch.tensor([1 << me])
    group.allreduce([total]).wait()
    return {"contributors": list(group.contributors), "sum": int(total)}


def _refusals(group: Any, uuid: int) -> list[str]:
    """What is said to a uuid that was used, to handles of others, and of processes that do not come."""
    own, nobody = group.get_reconfigure_handle(), new_handle("127.0.0.1", 1).encode()
    said = []
    for call in (
        lambda: _reconfigure(group, uuid, [own]),
        lambda: _reconfigure(group, -1, ["gloo"]),
        lambda: _reconfigure(group, -2, [own, nobody], limit_s=0.5),
        lambda: _reconfigure(group, -3, [nobody, own], limit_s=0.5),
        lambda: group.allreduce([torch.ones(1)]),
    ):
        try:
            call()
        except (RuntimeError, BmlError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _end(group: Any) -> None:
    if hasattr(dist, "_reconfigure"):
        dist.destroy_process_group()
    else:
        group.shutdown()


def _read(path: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.005)
    return path.read_text()
