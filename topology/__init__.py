"""What is wired: fabrics, their servers, NICs and switches, and what is left when parts of them die."""

from topology.bcube import BCube, bcube
from topology.errors import BmlError, FabricError, InvariantError, UsageError
from topology.fabric import Fabric, Link, Switch, Wiring
from topology.failure import Failure, LinkFailure, ServerFailure, SwitchFailure, parse_failure
from topology.notation import parse

__all__ = [
    "BCube",
    "BmlError",
    "Fabric",
    "FabricError",
    "Failure",
    "InvariantError",
    "Link",
    "LinkFailure",
    "ServerFailure",
    "Switch",
    "SwitchFailure",
    "UsageError",
    "Wiring",
    "bcube",
    "parse",
    "parse_failure",
]
