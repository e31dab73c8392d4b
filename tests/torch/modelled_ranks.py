"""Ranks of one process group as threads of this process, over the model of a job that the simulation uses."""

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from bml.sim.programs.communicator import ModelCommunicator
from bml.sim.programs.faults import Dead, Faults
from bml.sim.programs.group import Group
from bml.torch.process_group import ProcessGroup

_LIMIT_S = 30


def options(kind: Any, op: str = "", root: int | None = None) -> Any:
    """Options of a collective, of PyTorch's class `kind`."""
    made = kind()
    if op:
        made.reduceOp = getattr(dist.ReduceOp, op)
    if root is not None:
        made.rootRank = root
    return made


def run_ranks(
    n: int,
    function: Callable[[ProcessGroup], Any],
    kills: dict[int, tuple[int, str]] | None = None,
    joins: list[tuple[int, int]] | None = None,
    **options: Callable[[int], Any],
) -> list[Any]:
    """What `function(group)` returned, or raised, by rank; "dead" for ranks that were killed.

    `kills`: by rank, in which step and when (see Faults). `joins`: after which step a rank that was killed is
    started again; its last end counts. `options`: further arguments of its ProcessGroup, by rank.
    """
    threads: list[threading.Thread] = []

    def start(number: int, joins: bool) -> None:
        threads.append(threading.Thread(target=rank, args=[number, joins], daemon=True))
        threads[-1].start()

    model = Group(
        range(n), Faults(kills=kills or {}, joins=joins or []), lambda server: start(server, joins=True)
    )
    found: list[Any] = [None] * n

    def rank(number: int, joins: bool) -> None:
        further = {name: option(number) for name, option in options.items()}
        group = ProcessGroup(ModelCommunicator(model, number, joins), number, n, **further)
        try:
            found[number] = function(group)
        except Dead:
            found[number] = found[number] or "dead"
            group.shutdown()
            return
        except Exception as error:
            found[number] = error
        group.shutdown()
        model.end(number, None)

    for number in range(n):
        start(number, joins=False)
    for each in threads:  # joiners come at its end
        each.join(_LIMIT_S)
        assert not each.is_alive(), "a rank hangs"
    return found
