"""The modules that the fork server imports once, so that not every server has to.

They are those of PyTorch and scikit-learn that the launcher has imported, if the training function refers to
the package: each takes seconds of processor time. A process with threads cannot be forked; these packages
start none while they are imported. If something that they import does start one, nothing is preloaded.
"""

from __future__ import annotations

import importlib
import json
import os
import pickletools
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import ModuleType

_PACKAGES = ("torch", "torchvision", "sklearn", "bml.torch")
_DEPTH = 3
_MOST_TEXT = 200
_OTHERS = {*sys.stdlib_module_names, "bml", "numpy", "ray", "scipy", "sklearn", "torch", "torchvision"}
"""Packages whose modules refer to none of the user's."""
#: The first optimizer of a process imports it, which takes as long as PyTorch itself.
_OF_OPTIMIZERS = "torch._dynamo"


def worth_preloading(loaded: Iterable[str], used: Iterable[str]) -> list[str]:
    """Return those of the loaded modules that the fork server should import, in the order of their import.

    They are of packages of which a module is `used`. Modules deep in a package are left out: others import
    them.
    """
    used = list(used)
    packages = [package for package in _PACKAGES if any(_is_of(name, package) for name in used)]
    names = [
        name
        for name in loaded
        if name.count(".") < _DEPTH and any(_is_of(name, package) for package in packages)
    ]
    return [*names, _OF_OPTIMIZERS] if "torch" in names and _OF_OPTIMIZERS not in names else names


def referenced(pickled: bytes, modules: Mapping[str, ModuleType]) -> set[str]:
    """Return the names of `modules` to which a pickled function refers, also by way of other modules."""
    found: set[str] = set()
    left = [name for name in _texts(pickled) if name in modules]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        if name.partition(".")[0] not in _OTHERS:
            left += [each for each in map(_module_of, vars(modules[name]).values()) if each in modules]
    return found


def _texts(pickled: bytes) -> set[str]:
    """Return all texts in a pickle, and in pickles in it: names of modules are among them."""
    found = set[str]()
    for _, argument, _ in pickletools.genops(pickled):
        if isinstance(argument, str):
            found.update(argument.split(" ") if len(argument) < _MOST_TEXT else ())
        elif isinstance(argument, bytes) and argument.startswith(b"\x80"):
            with suppress(ValueError):  # bytes that are no pickle
                found |= _texts(argument)
    return found


def _module_of(value: object) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return name if isinstance(name, str) else ""


def _is_of(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def preload(argument: str) -> None:
    """Import the modules in this JSON list; errors are left for the server that imports them again.

    It is the last argument of this process, which is replaced by one that preloads nothing if that has
    started a thread.
    """
    n_before = _n_threads()
    for name in json.loads(argument):
        with suppress(Exception, SystemExit):
            importlib.import_module(name)
    if _n_threads() > n_before:
        os.execv(sys.executable, [*sys.orig_argv[:-1], "[]"])


def _n_threads() -> int:
    return len(os.listdir("/proc/self/task"))
