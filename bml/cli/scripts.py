"""Loads the script of a user, whose function `bml run` trains with."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from bml.errors import TrainingError, UsageError


def load_function(target: str) -> Callable[..., Any]:
    """Return the function that FILE.py[:FUNCTION] names.

    Raises UsageError that says what is missing, TrainingError for a file that raises while it is loaded.
    """
    file, name = (target, "") if Path(target).is_file() else target.rpartition(":")[::2]
    path = Path(file or name)
    if not path.is_file():
        raise UsageError(f"there is no file {path}; give FILE.py or FILE.py:FUNCTION")
    module = _load(path.resolve())
    function = getattr(module, name or "train", None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{file} has no function {name or 'train'!r}; it has {', '.join(known) or 'none'}")
    return function  # type: ignore[no-any-return]


def _load(path: Path) -> ModuleType:
    """Run a user's file as a module. A file called `queue.py` must not take the place of Python's `queue`."""
    sys.path.append(str(path.parent))  # last, as it is for modules beside it, also in the servers
    name = path.stem
    found = importlib.util.find_spec(name) if name.isidentifier() and name not in sys.modules else None
    if found is None or found.origin != str(path):
        name = "bml_script_" + re.sub(r"\W", "_", name)
    loader = SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except SystemExit as ends:
        if ends.code:
            raise
        raise TrainingError(f"{path} ended while it was loaded, so there is no job") from ends
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt | SystemExit):  # in a __set_name__, by Python 3.11
            raise error.__cause__ from None
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
            trace = trace.tb_next  # frames of ours; a syntax error has no others
        shown = "".join(traceback.format_exception(type(error), error, trace))
        raise TrainingError(f"{path} cannot be loaded\n{shown.rstrip()}") from error
    return module
