"""Sends a training function to the servers, with the launcher's `sys.argv` and `sys.path`."""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from collections.abc import Callable
from functools import partial
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from bml.cluster.process.imports import paths
from bml.errors import UsageError
from bml.train.session import Session

Train = Callable[[Session], Any]
_UNNAMED = "<dynamic-code>"


def _reduced(code: CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, but with its file: tracebacks show the user's lines."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)[:2]
    return make, tuple(code.co_filename if each == _UNNAMED else each for each in arguments)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Newer cloudpickles name no files, as equal functions of two files are then equal bytes."""

    dispatch_table: ClassVar = ChainMap({CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)


def pack(train: Train) -> bytes:
    """Pickle a training function for the servers, with `sys.argv` and `sys.path` of this process.

    It is sent by value, unless it is of an installed package: other machines have no copy of a user's file.
    Raises UsageError if it cannot be pickled.
    """
    module = _users_module(train)
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        _Pickler(function := io.BytesIO()).dump(train)
    except Exception as error:  # objects to which it refers may raise anything
        raise UsageError(
            f"the training function cannot be sent to the servers: {type(error).__name__}: {error}; make "
            "inside of it the objects that cannot be pickled"
        ) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)
    sent: bytes = cloudpickle.dumps((sys.argv, paths(), function.getvalue()))
    return sent


def unpack(sent: bytes) -> Train:
    """Return the training function, in the process of a server.

    `sys.argv` is that of the launcher from now on, and the launcher's folders of modules are at the end of
    `sys.path`. Raises any error of loading the function.
    """
    sys.argv[:], folders, function = cloudpickle.loads(sent)
    sys.path += [path for path in folders if path not in sys.path]
    train: Train = cloudpickle.loads(function)
    return train


def _users_module(train: Train) -> ModuleType | None:
    """Return the module of a function, also in functools.partial; None for `__main__` or an installed one."""
    function: Any = train
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    module = sys.modules.get(name)
    installed = "site-packages" in (getattr(module, "__file__", None) or "")
    if name == "__main__" or installed or name.partition(".")[0] in sys.stdlib_module_names:
        return None
    return module
