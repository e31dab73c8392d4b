"""The pure protocol and schedules on a virtual clock: same code as in production, everything from a seed."""

from bml.sim.judge.history import History
from bml.sim.judge.promises import PromiseBroken
from bml.sim.mishaps.chaos import FOREVER, Mishap, When, draw
from bml.sim.simulation import Simulation
from bml.sim.world.network import Network

__all__ = ["FOREVER", "History", "Mishap", "Network", "PromiseBroken", "Simulation", "When", "draw"]
