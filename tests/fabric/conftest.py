"""The fixture that will be the plugin's, and the toy training of the tests with real processes."""

import sys
from pathlib import Path

from bml.fabric.fixtures import emulated_fabric

__all__ = ["emulated_fabric"]

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
