"""The pure protocol and schedules on a virtual clock: same code as in production, everything from a seed."""

from bml.sim.network import Network
from bml.sim.simulation import History, Simulation

__all__ = ["History", "Network", "Simulation"]
