"""What is wired: fabrics, their servers, NICs and switches, and what is left when parts of them die."""

from topology.bcube import BCube, bcube
from topology.bigswitch import BigSwitch, big_switch
from topology.errors import BmlError, FabricError, InvariantError, UsageError
from topology.fabric import Fabric, Link, Switch
from topology.failure import Failure, LinkFailure, ServerFailure, SwitchFailure, parse_failure
from topology.fattree import FatTree, fat_tree
from topology.notation import parse
from topology.torus import Torus, torus
from topology.wiring import Hop, InnerLink, InnerNode, Wiring

__all__ = [
    "BCube",
    "BigSwitch",
    "BmlError",
    "Fabric",
    "FabricError",
    "Failure",
    "FatTree",
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
    "parse",
    "parse_failure",
    "torus",
]
