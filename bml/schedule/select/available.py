"""The algorithms that there are: importing the file of an algorithm registers it. One line for each."""

# ruff: noqa: F401

import bml.schedule.algorithms.detour
import bml.schedule.algorithms.exchange
import bml.schedule.algorithms.flextree
import bml.schedule.algorithms.hips
import bml.schedule.algorithms.mesh
import bml.schedule.algorithms.ps
import bml.schedule.algorithms.ring
import bml.schedule.algorithms.tree
import bml.schedule.packed.packing
from bml.schedule.algorithms.registry import registered

ALGORITHMS = ("auto", *registered())
"""Names that `plan` takes; some may be followed by a colon and more, such as `flextree:3x3`."""
