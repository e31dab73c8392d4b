"""The modules that the fork server imports once, so that not every server has to.

They are those of PyTorch and scikit-learn that the launcher has imported, as it has loaded the training
function: each takes seconds of processor time. A process with threads cannot be forked; these packages start
none while they are imported. If something that they import does start one, nothing is preloaded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress

_PACKAGES = ("torch", "torchvision", "sklearn", "bml.torch")
_DEPTH = 3
#: The first optimizer of a process imports it, which takes as long as PyTorch itself.
_OF_OPTIMIZERS = "torch._dynamo"


def worth_preloading(loaded: Iterable[str]) -> list[str]:
    """Return those of the loaded modules that the fork server should import, in the order of their import.

    Modules deep in a package are left out: others import them.
    """
    names = [
        name
        for name in loaded
        if name.count(".") < _DEPTH and any(f"{name}.".startswith(f"{package}.") for package in _PACKAGES)
    ]
    return [*names, _OF_OPTIMIZERS] if "torch" in names and _OF_OPTIMIZERS not in names else names


def preload(argument: str) -> None:
    """Import the modules in this JSON list; errors are left for the server that imports them again.

    If that has started a thread, this process is replaced by one that preloads nothing.
    """
    n_before = _n_threads()
    for name in json.loads(argument):
        with suppress(Exception, SystemExit):
            importlib.import_module(name)
    if _n_threads() > n_before:
        os.execv(sys.executable, [*sys.orig_argv[:-1], "[]"])


def _n_threads() -> int:
    return len(os.listdir("/proc/self/task"))
