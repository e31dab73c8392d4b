"""Wiring: fabrics, their servers, NICs and switches, and what is left when parts of them die."""

from bml.topology.bcube import BCube, bcube
from bml.topology.bigswitch import BigSwitch, big_switch
from bml.topology.errors import BmlError, FabricError, InvariantError, UsageError
from bml.topology.fabric import Fabric, Link, Switch
from bml.topology.failure import Failure, LinkFailure, ServerFailure, SwitchFailure, parse_failure
from bml.topology.fattree import FatTree, fat_tree
from bml.topology.graph import Graph, graph
from bml.topology.notation import parse
from bml.topology.torus import Torus, torus
from bml.topology.wiring import Hop, InnerLink, InnerNode, Wiring

__all__ = [
    "BCube",
    "BigSwitch",
    "BmlError",
    "Fabric",
    "FabricError",
    "Failure",
    "FatTree",
    "Graph",
    "Hop",
    "InnerLink",
    "InnerNode",
    "InvariantError",
    "Link",
    "LinkFailure",
    "ServerFailure",
    "Switch",
    "SwitchFailure",
    "Torus",
    "UsageError",
    "Wiring",
    "bcube",
    "big_switch",
    "fat_tree",
    "graph",
    "parse",
    "parse_failure",
    "torus",
]
