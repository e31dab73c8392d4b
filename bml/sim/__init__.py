"""The pure protocol and schedules on a virtual clock: same code as in production, everything from a seed."""

from bml.sim.chaos import FOREVER, Mishap, When, draw
from bml.sim.history import History
from bml.sim.network import Network
from bml.sim.promises import PromiseBroken
from bml.sim.simulation import Simulation

__all__ = ["FOREVER", "History", "Mishap", "Network", "PromiseBroken", "Simulation", "When", "draw"]
