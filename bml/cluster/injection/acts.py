"""The acts that there are: importing a file of acts registers them. One line for each file."""

# ruff: noqa: F401

import bml.cluster.injection.coordinator_acts
import bml.cluster.injection.nic_acts
import bml.cluster.injection.server_acts
from bml.cluster.injection.registry import COORDINATOR_ACTS, SERVER_ACTS

__all__ = ["COORDINATOR_ACTS", "SERVER_ACTS"]
