"""What a new process of Python needs to import the modules of this one."""

from __future__ import annotations

import os
import sys


def what_we_import() -> dict[str, str]:
    """Environment of a process that can import all modules of this one, also the user's own."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
