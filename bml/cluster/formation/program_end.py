"""How the program of this process ends: whether it failed, as its groups tell the others.

When a process ends, Python has forgotten the SystemExit that ended its program, and with it the status. So
`watch` has sys.exit remember it. A SystemExit that a program raises without sys.exit is taken for a good end.
"""

from __future__ import annotations

import sys
import threading
from typing import NoReturn

_before = sys.exit
_watches = False
_failed = False


def watch() -> None:
    """Remember from now on whether sys.exit was last given the status of a failure. Idempotent."""
    global _before, _watches
    if not _watches:  # once: another one that wraps sys.exit after us calls us
        _before, sys.exit, _watches = sys.exit, _exit, True


def is_failure(raised: BaseException | None) -> bool:
    """Whether a program that is ended by this exception, or by none, has failed."""
    return raised is not None and not (isinstance(raised, SystemExit) and not raised.code)


def has_failed() -> bool:
    """Whether the program has failed; for handlers that run at the end of the process."""
    return _failed or is_failure(sys.exc_info()[1] or getattr(sys, "last_value", None))


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    global _failed
    if threading.current_thread() is threading.main_thread():  # another one ends itself alone
        _failed = bool(status)
    _before(status)  # type: ignore[arg-type]
