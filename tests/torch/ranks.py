"""Ranks of one process group as threads of this process, over the model of a job that the simulation uses."""

import threading
from collections.abc import Callable
from typing import Any

from bml.sim.programs.communicator import ModelCommunicator
from bml.sim.programs.faults import Dead, Faults
from bml.sim.programs.group import Group
from bml.torch.process_group import ProcessGroup

_LIMIT_S = 30


def run_ranks(
    n: int, function: Callable[[ProcessGroup], Any], kills: dict[int, tuple[int, str]] | None = None
) -> list[Any]:
    """What `function(group)` returned, or raised, by rank; "dead" for ranks that were killed.

    `kills`: by rank, in which step and when (see Faults).
    """
    model = Group(range(n), Faults(kills=kills or {}), lambda server: None)
    found: list[Any] = [None] * n

    def rank(number: int) -> None:
        group = ProcessGroup(ModelCommunicator(model, number), number, n)
        try:
            found[number] = function(group)
        except Dead:
            found[number] = "dead"
        except Exception as error:
            found[number] = error
        group.shutdown()

    threads = [threading.Thread(target=rank, args=[number], daemon=True) for number in range(n)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(_LIMIT_S)
        assert not each.is_alive(), "a rank hangs"
    return found
