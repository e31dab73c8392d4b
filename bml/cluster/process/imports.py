"""What a new process of Python needs to import the modules of this one."""

from __future__ import annotations

import os
import sys


def paths() -> list[str]:
    """Return the folders where this process looks for modules, without those of a removed working folder."""
    try:
        os.getcwd()
    except OSError:
        return [path for path in sys.path if os.path.isabs(path)]
    # Some are no folders: packages that are installed in place have a name for their finder.
    return [os.path.abspath(path) if os.path.exists(path or ".") else path for path in sys.path]


def what_we_import() -> dict[str, str]:
    """Environment of a process that can import all modules of this one, also the user's own.

    Start it with `-P`, or a file beside the user's script may be taken for a module of Python.
    """
    return {"PYTHONPATH": os.pathsep.join(paths())}
