"""How the program of this process ends: whether it failed, as its groups tell the others.

When a process ends, Python has forgotten the SystemExit that ended its program, and with it the status. So
`watch` has sys.exit remember it, and `exit` and `quit` call that. A SystemExit that a program raises itself
is taken for a good end. One that the program catches, such as that of argparse, is forgotten as soon as the
program lets go of it.
"""

from __future__ import annotations

import sys
import threading
from _sitebuiltins import Quitter
from contextlib import suppress
from typing import Any, NoReturn

_before = sys.exit
_watches = False
_failed = False
_n_exits = 0
"""How often sys.exit was called in the main thread."""


def watch() -> None:
    """Remember from now on whether sys.exit was last given the status of a failure. Idempotent."""
    global _before, _watches
    if not _watches:  # once: another one that wraps sys.exit after us calls us
        _before, sys.exit, _watches = sys.exit, _exit, True
        Quitter.__call__ = _quit  # type: ignore[method-assign, assignment]


def is_failure(raised: BaseException | None) -> bool:
    """Whether a program that is ended by this exception, or by none, has failed."""
    return raised is not None and not (isinstance(raised, SystemExit) and not raised.code)


def has_failed() -> bool:
    """Whether the program has failed; for handlers that run at the end of the process."""
    return _failed or is_failure(sys.exc_info()[1] or getattr(sys, "last_value", None))


class _Exit:
    """One call of sys.exit. It lives in the frame of the call, and so as long as the traceback does.

    Python drops a SystemExit that nobody catches when no frame is left. If one is dropped while the main
    thread is in a function or a module, the program has caught it and goes on.
    """

    def __init__(self) -> None:
        global _n_exits
        self._number = _n_exits = _n_exits + 1

    def __del__(self) -> None:
        global _failed
        if self._number == _n_exits and _is_running():
            _failed = False


def _is_running() -> bool:
    """Whether what calls __del__ is the program: neither the interpreter at its end nor another thread."""
    this = threading.current_thread()
    return this is threading.main_thread() and this.is_alive() and sys._getframe(1).f_back is not None


def _quit(quitter: Quitter, code: Any = None) -> NoReturn:
    """`exit(code)` and `quit(code)`, which raise SystemExit without sys.exit."""
    with suppress(Exception):  # as in site: shells look whether it is closed
        sys.stdin.close()
    sys.exit(code)


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    global _failed
    if threading.current_thread() is threading.main_thread():  # another one ends itself alone
        _held = _Exit()  # by this frame
        _failed = bool(status)
    _before(status)  # type: ignore[arg-type]
