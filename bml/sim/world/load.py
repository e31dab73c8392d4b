"""A host with too few cores: every process runs for a moment, then waits for its turn."""

from __future__ import annotations

import random

from bml.sim.world.network import Network
from bml.sim.world.process import Process

_TURN_S = (0.005, 0.1)  # how long others keep a core
_WAITS = 0.35
"""How long a process waits for its turn, as a share of how long reactions take: they need several turns."""


class Load:
    """Makes processes wait for their turn, again and again, and react to messages up to `longest_s` late.

    While one waits, its heartbeats are late and no message that reaches it is read. 0: no process waits.
    """

    def __init__(self, network: Network, longest_s: float, seed: int):
        self._network = network
        self._longest_s = longest_s
        self._chance = random.Random(f"load {seed}")

    def add(self, process: Process) -> None:
        """This process shares the host from now on."""
        if self._longest_s:
            self._network.after(self._chance.uniform(*_TURN_S), lambda: self._wait(process))

    def late_s(self) -> float:
        """By how much the next reaction to a control message is late."""
        return self._chance.uniform(0.0, self._longest_s) if self._longest_s else 0.0

    def _wait(self, process: Process) -> None:
        if process.runs:  # else something else has stopped it
            process.freeze(briefly=True)
            waits_s = self._chance.uniform(0.0, _WAITS * self._longest_s)
            self._network.after(waits_s, lambda: self._go_on(process))
        elif process.alive:
            self.add(process)

    def _go_on(self, process: Process) -> None:
        process.thaw()
        if process.alive:
            self.add(process)
